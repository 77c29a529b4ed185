"""Inductor code that a person can read and change: one directory a piece below the dump directory.

What runs is always loaded from there. A directory that exists is used as it is, so an edit of its
Python or C++ source takes effect at the next start; removing it compiles the piece anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from ..torch_compat import inductor_load_unpacked, inductor_options, inductor_unpack
from .artifact import Blobs, PieceFn
from .compilers import Compiler
from .readable import readable


def unpacked_inductor(dump_dir: Path) -> Compiler:
    """Inductor, by way of directories `inductor_<hash>` in `dump_dir`; it keeps no artifacts."""

    def compile_piece(
        graph: GraphModule, inputs: list[Any], options: Mapping[str, Any]
    ) -> tuple[PieceFn, Blobs]:
        content = f"{readable(graph)} {_stable(options)}"
        folder = dump_dir / f"inductor_{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        with inductor_options():
            if not folder.exists():
                inductor_unpack(graph, inputs, dict(options), str(folder))
                (folder / "graph.py").write_text(readable(graph))
            return inductor_load_unpacked(str(folder)), {}

    return Compiler("inductor", compile_piece)


def _stable(options: Mapping[str, Any]) -> list[Any]:
    """Options as a text that the next process gives too: a pass by what it says it is."""
    return [
        (name, value.uuid() if hasattr(value, "uuid") else value)
        for name, value in sorted(options.items())
    ]
