"""Regions that a model compiles itself with `torch.compile`: counted, named, kept in the cache.

Guarantee: what is compiled in a region during start and warm-up is counted, named, and stored in
our cache for the next start. Cost: none per step. Switch: `PIECEGRAPH_OFF=regions`.

Regions are compiled while dummy batches run, for the sizes of these. torch looks for their code in
its own cache directory. Meanwhile that is a scratch directory with the code that an earlier start
has stored in ours, and what is new in it is stored at the end. A traced model has no such regions.
"""

from __future__ import annotations

import io
import sys
import weakref
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ....cache import Entry, Key
from ....cache.lock import temporary_directory
from ....compile.backends.inductor import compiling
from ....compile.bundle.key_factors import machine_key
from ....compile.conditions.values import Undescribable, class_name
from ....config import compile_config
from ....torch_compat.basics.structured_trace import listening
from ...capture.capture_all import Progress
from ...core.code import ModelCode
from ...core.records import RegionCompiled
from ...core_model import CoreModel
from ...part import CaptureSet, Part

_KIND, _FILES = "regions", "files"


class RegionsPart(Part):
    """The regions of the code in service."""

    name = "regions"

    def __init__(self, core: CoreModel) -> None:
        self._environment = core.environment
        self._records = core.environment.records
        self._code: ModelCode | None = None
        self._folder: Path | None = None
        """A scratch directory for the code of the regions, which lasts as long as the code."""
        self._until = ExitStack()
        weakref.finalize(self, self._until.close)
        self._key: Key | None = None
        self._stored = 0
        """How many regions were generated when their code was stored."""

    def code_replaced(self, code: ModelCode) -> None:
        if code is not self._code:
            self.close()
            self._code = code

    @contextmanager
    def around_dummy_batch(self) -> Iterator[None]:
        """Count what is compiled inside, and use stored code for it."""
        compiled = self._code.compiled if self._code is not None else None
        if compiled is None or compiled.traced or "torch._dynamo" not in sys.modules:
            yield
            return
        if self._folder is None:
            self._folder = self._load(class_name(type(compiled.model)))
        with listening(self._hear), compiling(str(self._folder)):
            yield

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        def capture_and_store(progress: Progress | None) -> None:
            try:
                capture(progress)
            finally:
                self.sealed()

        return capture_and_store

    def sealed(self) -> None:
        """Store the code in the cache if some of it is new."""
        generated = [each for each in self._records.of(RegionCompiled) if each.generated]
        if self._folder is None or self._key is None or len(generated) == self._stored:
            return
        self._stored = len(generated)
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as files:
            for file in sorted(self._folder.rglob("*")):
                if file.is_file() and file.suffix not in (".lock", ".tmp"):
                    name = zipfile.ZipInfo(str(file.relative_to(self._folder)))
                    files.writestr(name, file.read_bytes())
        meta = {"compile_seconds": sum(each.seconds for each in generated)}
        self._environment.cache.publish(_KIND, self._key, meta, {_FILES: content.getvalue()})

    def close(self) -> None:
        self._code = self._folder = self._key = None
        self._stored = 0
        self._until.close()

    def _load(self, model: str) -> Path:
        """The scratch directory, with what is stored."""
        environment = self._environment
        folder = self._until.enter_context(temporary_directory())
        try:
            machine = machine_key(compile_config(environment.config).code, environment.device)
            self._key = machine.extended({"model": model})
        except Undescribable as error:
            self._records.compile.not_cacheable += (f"compiled regions: {error}",)
            return folder
        entry = environment.cache.lookup(_KIND, self._key)
        if isinstance(entry, Entry):
            with zipfile.ZipFile(io.BytesIO(entry.contents[_FILES])) as files:
                files.extractall(folder)
        return folder

    def _hear(self, metadata: Mapping[str, Any], record: Any) -> None:
        """Record each region that torch's structured trace says was compiled."""
        facts: dict[str, Any] | None = metadata.get("compilation_metrics")
        if facts is not None:
            generated = bool(facts.get("inductor_compile_time_s"))
            self._records.counters["dynamo_traces"] += 1
            self._records.counters["inductor_compiles"] += generated
            where = f"{facts.get('co_filename')}:{facts.get('co_firstlineno')}"
            seconds = facts.get("entire_frame_compile_time_s") or 0.0
            name = str(facts.get("co_name"))
            self._records.add(RegionCompiled(name, where, seconds, generated))
