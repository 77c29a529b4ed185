"""Compiling as data: request, compiler, what a unique piece gives, records of what was done.

An artifact is stored as named blobs, whose names its compiler chooses. Several artifacts may share
`kernel.*`, `compiler` and `probe.*`; every other blob is the code of one. `library` is an
AOTInductor library, which takes longer to build and loads in a millisecond.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from ...cache import Cache, Entry, Key, Miss
from ...cache.inspection import nearest_entries
from ...cache.keys.factors import Json
from ...cache.layers import DEPLOY
from ...errors import SettingsChanged
from ...events import Events
from ...torch_compat.basics.settings import TorchState
from .config import CompileConfig, call_forms

ExampleArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of one call."""

PieceFn = Callable[[list[Any]], Any]
"""A piece takes one list of tensors and sizes and returns a sequence of tensors."""

Blobs = Mapping[str, bytes]
"""An artifact: verified contents by name."""

Built = tuple[PieceFn, Blobs]
"""The callable of one piece and the artifact to store, empty if nothing can be stored."""

Building = Callable[[], Built]
"""Waits until the generated code of a piece can run."""

CompilePiece = Callable[[GraphModule, list[Any], Mapping[str, Any]], Building]


@dataclass(frozen=True)
class Compiler:
    """`compile(graph, inputs, options)()` gives the callable of a piece and its artifact.

    `load` rebuilds the callables of several artifacts at once; None for a compiler without
    artifacts.
    """

    name: str
    compile: CompilePiece
    load: Callable[[Sequence[Blobs]], list[PieceFn]] | None = None
    first_use: Callable[[torch.device, Events], None] | None = None
    """What is needed once per process or machine, so that no piece is timed with it."""
    session: Callable[[], AbstractContextManager[None]] = nullcontext
    """A context that is open while the pieces of one model are compiled."""
    before_load: Callable[[Events], None] | None = None
    """What `load` needs once per process, in a span of its own."""
    in_workers: bool = False
    """Whether worker processes can do its work; see `backends.workers`."""
    version: str = ""
    """Changes with the code that it generates. In the trace key and the codegen key, so that code
    of another version is not loaded. Required of an entry point with `load`; Inductor's is torch's.
    """


KERNEL = "kernel."
"""Prefix of compiled C++ libraries."""
PROBE = "probe."
"""Prefix of recorded compiler probes; see `torch_compat.toolchain.probes`."""
COMPILER = "compiler"
"""Version of the C++ compiler that built the kernels."""
LIBRARY = "library"


def is_own_code(blob: str) -> bool:
    """Whether no two artifacts have this blob in common, unless they are equal."""
    return blob != COMPILER and not blob.startswith((KERNEL, PROBE))


@dataclass(frozen=True, slots=True)
class BundleOutcome:
    """Whether the model came from a bundle: its `bytes` and kernels per artifact, or why not."""

    hit: bool
    reason: str | None = None
    detail: str | None = None
    remedy: str | None = None
    """What to do about it, if another thing than to build a bundle."""
    bytes: int | None = None
    kernels: list[int] | None = None
    digest: str | None = None
    """`Entry.digest` of the bundle."""

    def facts(self) -> dict[str, Any]:
        """What is known of it, JSON-able."""
        shown = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in shown.items() if value is not None}


@dataclass(frozen=True, slots=True)
class BundleMiss:
    """Why a model does not come from a bundle."""

    reason: str
    detail: str = ""
    remedy: str = DEPLOY
    tried: frozenset[str] = frozenset()
    """Digests of the stored bundles that cannot be used."""

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class PieceBuilt:
    """A unique piece that was compiled in this process."""

    piece: int
    seconds: float
    kernels: int


@dataclass(slots=True)
class CompileRecords:
    """Of one `prepare`. `lookups` are kept only where events want details."""

    bundle: BundleOutcome | None = None
    not_cacheable: tuple[str, ...] = ()
    """What the trace relied on and cannot be stored as a condition, each with the user's line."""
    failed_libraries: list[str] = field(default_factory=list)
    """Why artifacts have no ahead-of-time library."""
    failed_writes: list[str] = field(default_factory=list)
    """Why layers of the cache could not store code."""
    pieces: list[PieceBuilt] = field(default_factory=list)
    lookups: list[dict[str, Any]] = field(default_factory=list)

    def not_stored(self) -> str:
        """Why the next start does not find all code in the cache; empty if it does."""
        reasons = (*self.failed_libraries, *self.not_cacheable, *self.failed_writes)
        return "; ".join(dict.fromkeys(reasons))


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
    dump_dir: Path | None = None
    """Where readable graphs and generated code are written."""
    executor: Executor | None = None
    """What compiles pieces beside this process; None is a pool of our own."""
    needs_bundle: bool = False
    """Whether a start without a bundle is an error."""
    serving: bool = False
    """Whether this process serves meanwhile, and has little time for this."""
    checkpoint: Callable[[], None] = lambda: None
    """Called between phases and pieces, and during waits; raises what ends the compilation."""
    progress: Callable[[str], None] = lambda _: None
    """Called with what was compiled, or what is waited for."""
    state: TorchState = field(default_factory=TorchState.now)
    """That of `prepare`, which the key holds."""
    changed_meanwhile: Callable[[], str] = lambda: ""
    """What other threads have changed since the last call while this one was in a compiler, also
    if it is as before again."""
    copies_layers: bool = True
    """Whether a trace may copy equal layers; one that verifies such a trace may not."""

    def forms(self) -> list[CompileRequest]:
        """One request for each call form of the model."""
        config = self.config
        return [
            replace(self, config=replace(config, inputs=form)) for form in call_forms(config.inputs)
        ]

    def check_state(self) -> None:
        """At the end of a trace, around code generation, before storing: raise SettingsChanged if
        it ran under another state of torch than `state`."""
        self.checkpoint()
        if changed := self.changed_meanwhile() or self.state.changed():
            raise SettingsChanged(changed=changed)

    def record_bundle(self, outcome: BundleOutcome, level: int = logging.DEBUG) -> None:
        """Record whether a bundle is used; the last outcome holds."""
        self.records.bundle = outcome
        self.events.emit("bundle", level=level, **outcome.facts())

    def record_miss(self, miss: BundleMiss, level: int = logging.DEBUG) -> None:
        """Record why no bundle is used."""
        remedy = None if miss.remedy == DEPLOY else miss.remedy
        outcome = BundleOutcome(False, miss.reason, miss.detail or None, remedy)
        self.record_bundle(outcome, level)

    def record_lookup(self, kind: str, key: Key, result: Entry | Miss) -> None:
        """Record the factors of a key and, for a miss, how the nearest entry differs, if wanted."""
        if not self.events.wants_detail:
            return
        facts: dict[str, Any] = {"kind": kind, "key": key.digest, "factors": key.factors}
        if isinstance(result, Entry):
            facts |= {"hit": True, "layer": result.layer, "bytes": result.size}
        else:
            near = nearest_entries(self.cache.layers, kind, key, 1)
            differs = [str(difference) for entry in near for difference in entry.differences]
            facts |= {"hit": False, "reason": result.reason, "detail": result.detail}
            facts["differs"] = differs
        self.records.lookups.append(facts)
        self.events.emit("cache.lookup", **facts)

    def record_not_cacheable(self, reasons: Sequence[str]) -> None:
        """Record why no bundle of this model can be stored."""
        self.records.not_cacheable = tuple(reasons)
        self.events.emit("bundle.not_kept", level=logging.WARNING, reason="; ".join(reasons))

    def publish(
        self, kind: str, key: Key, meta: Mapping[str, Json], blobs: Mapping[str, bytes]
    ) -> Entry:
        """Store an entry in the cache, or record why a layer could not store it."""
        entry = self.cache.publish(kind, key, meta, blobs)
        self.records.failed_writes += entry.unstored
        return entry

    def wait(self) -> None:
        """Called while another process compiles the model."""
        self.checkpoint()
        self.progress("another process compiles it")


def kernels(artifacts: Sequence[Blobs]) -> list[int]:
    """Number of compiled libraries in each artifact."""
    return [sum(name.startswith(KERNEL) for name in artifact) for artifact in artifacts]
