"""A request to compile a model, and what compiling one unique piece gives: a callable and blobs.

An artifact is stored as named blobs. `code`, `kernel.*`, `compiler` and `probe.*` make up the
standalone artifact of Inductor. `library` is an AOTInductor library, which takes longer to build
and loads in a millisecond.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...cache import Cache
from ...events import Events
from .config import CompileConfig
from .records import BundleOutcome, CompileRecords

ExampleArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of one call."""

PieceFn = Callable[[list[Any]], Any]
"""A piece takes one list of tensors and sizes and returns a sequence of tensors."""

Blobs = Mapping[str, bytes]
"""An artifact: verified contents by name."""

Finish = Callable[[], tuple[PieceFn, Blobs]]
"""Waits for the compiler to finish one piece; returns its callable and the artifact to store."""

CODE = "code"
KERNEL = "kernel."
"""Prefix of compiled C++ libraries."""
PROBE = "probe."
"""Prefix of recorded compiler probes; see `torch_compat.toolchain.probes`."""
COMPILER = "compiler"
"""Version of the C++ compiler that built the kernels."""
LIBRARY = "library"


@dataclass(frozen=True)
class CompileRequest:
    """A model to compile, its settings and services.

    `examples` are (args, kwargs) to trace with, if given. `exchange(topic, facts)` returns the
    facts of every rank, in rank order, when several ranks must start alike.
    """

    model: torch.nn.Module
    config: CompileConfig
    cache: Cache
    events: Events
    device: torch.device
    examples: ExampleArguments | None = None
    exchange: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]] | None = None
    records: CompileRecords = field(default_factory=CompileRecords)

    def record_bundle(self, outcome: BundleOutcome, level: int = logging.DEBUG) -> None:
        """Record whether a bundle is used; the last outcome holds."""
        self.records.bundle = outcome
        self.events.emit("bundle", level=level, **outcome.facts())


def kernels(artifacts: Sequence[Blobs]) -> list[int]:
    """Number of compiled libraries in each artifact."""
    return [sum(name.startswith(KERNEL) for name in artifact) for artifact in artifacts]
