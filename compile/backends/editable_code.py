"""Generated code that can be read and edited: one directory per piece in the dump directory.

The code that runs is always loaded from there. An existing directory is used as it is: an edit of
its Python or C++ source takes effect at the next start, which logs that the code was changed.
Delete the directory to compile the piece again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ...events import Events
from ...torch_compat.compiling.inductor import (
    inductor_cache_directory,
    inductor_compile_to,
    inductor_load_from,
    inductor_options,
)
from ..ir.compilation import Building, Compiler
from ..ir.locations import graph_source
from .inductor import scratch, toolchain_directory

DIGESTS = "digests.json"
"""File next to the code with the sha256 of each generated file."""


def editable_inductor(dump_dir: Path, events: Events) -> Compiler:
    """Inductor with code in directories `inductor_<hash>` of `dump_dir`; stores no artifacts."""

    def compile_piece(
        graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
    ) -> Building:
        stated = {name: _stated(option) for name, option in sorted(options.items())}
        content = f"{graph_source(graph)} {stated}"
        folder = dump_dir / f"inductor_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        with scratch() as temporary, inductor_options(toolchain_directory(temporary)):
            if not folder.exists():
                with inductor_cache_directory(temporary):
                    inductor_compile_to(graph, inputs, dict(options), str(folder))
                (folder / "graph.py").write_text(graph_source(graph))
                (folder / DIGESTS).write_text(json.dumps(_digests(folder)))
            _report_edits(folder, events)
            loaded = inductor_load_from(str(folder))
        return lambda: (loaded, {})

    return Compiler("inductor", compile_piece)


def _stated(option: Any) -> Any:
    """An option as text that is equal in every process; a pass is stated by its key."""
    return option.uuid() if hasattr(option, "uuid") else option


def _report_edits(folder: Path, events: Events) -> None:
    """Report edits of generated files; torch adds other files when it loads the code."""
    stated = json.loads((folder / DIGESTS).read_text()) if (folder / DIGESTS).exists() else {}
    if not stated or not stated.items() <= _digests(folder).items():
        events.count("compile.tampered")
        events.emit("compile.tampered", level=logging.WARNING, directory=folder.name)


def _digests(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.suffix in (".py", ".cpp", ".h")
    }
