"""Regions that a model compiles itself with `torch.compile`: counted, named, kept in the cache.

They are compiled while dummy batches run, for the sizes of these. torch looks for their code in its
own cache directory. Meanwhile that is a scratch directory with the code that an earlier start has
stored in ours, and what is new in it is stored at the end. A traced model has no such regions.
"""

from __future__ import annotations

import io
import logging
import sys
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from ....cache import Cache, Entry, Key
from ....cache.lock import temporary_directory
from ....compile.backends.inductor import compiling
from ....compile.bundle.key_factors import machine_key
from ....compile.conditions.values import Undescribable, class_name
from ....compile.ir.config import CodeConfig
from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.structured_trace import TRACE_LOGGER
from ...core.records import Records, RegionCompiled

_KIND, _FILES = "regions", "files"


class Regions:
    """The regions of one model."""

    def __init__(
        self, compiled: CompiledModel, code: CodeConfig, device: torch.device,
        cache: Cache, records: Records,
    ) -> None:  # fmt: skip
        self._model = None if compiled.traced else type(compiled.model)
        self._code = code
        self._device = device
        self._cache = cache
        self._records = records
        self._folder: Path | None = None
        self._key: Key | None = None
        self._stored = 0

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Count what is compiled inside, and use stored code for it."""
        if self._model is None or "torch._dynamo" not in sys.modules:
            yield
            return
        if self._folder is None:
            self._folder = self._load(class_name(self._model))
        handler = _Compiles(self._records)
        logger = logging.getLogger(TRACE_LOGGER)
        logger.addHandler(handler)
        try:
            with compiling(str(self._folder)):
                yield
        finally:
            logger.removeHandler(handler)

    def store(self) -> None:
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
        self._cache.publish(_KIND, self._key, meta, {_FILES: content.getvalue()})

    def _load(self, model: str) -> Path:
        """A scratch directory, which lasts as long as this object, with what is stored."""
        until = ExitStack()
        folder = until.enter_context(temporary_directory())
        weakref.finalize(self, until.close)
        try:
            self._key = machine_key(self._code, self._device).extended({"model": model})
        except Undescribable as error:
            self._records.compile.not_cacheable += (f"compiled regions: {error}",)
            return folder
        entry = self._cache.lookup(_KIND, self._key)
        if isinstance(entry, Entry):
            with zipfile.ZipFile(io.BytesIO(entry.contents[_FILES])) as files:
                files.extractall(folder)
        return folder


class _Compiles(logging.Handler):
    """Records each region that torch's structured trace says was compiled."""

    root_dir = None  # as in torch's own handlers: nothing is written

    def __init__(self, records: Records) -> None:
        super().__init__()
        self._records = records

    def handle(self, record: logging.LogRecord) -> bool:
        facts: dict[str, Any] | None = getattr(record, "metadata", {}).get("compilation_metrics")
        if facts is not None:
            generated = bool(facts.get("inductor_compile_time_s"))
            self._records.counters["dynamo_traces"] += 1
            self._records.counters["inductor_compiles"] += generated
            where = f"{facts.get('co_filename')}:{facts.get('co_firstlineno')}"
            seconds = facts.get("entire_frame_compile_time_s") or 0.0
            name = str(facts.get("co_name"))
            self._records.add(RegionCompiled(name, where, seconds, generated))
        return True
