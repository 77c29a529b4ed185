"""The replay backend: graphs on a CPU, for tests without a GPU.

It emulates what makes graphs on a device different from a plain run: fixed addresses, outputs that
the next replay overwrites, Python that does not run again, captures that do not execute, memory
that can run out. Misuse that gives silent garbage on a device is an error here, some of it only
with `ReplayOptions`.

    backend = piecegraph.ReplayBackend(piecegraph.ReplayOptions(poison_before_replay=True))
    prepared = piecegraph.prepare(model, config, backend=backend)
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.tensors import normal_alias
from ..ownership import Ownership
from ..protocol import BoundGraph, Code, Memory, Replay
from .delayed_code import delayed_code, delayed_replay
from .host_copies import HostCopies
from .tape import Tape, poison
from .tape_graph import TapeGraph
from .work_queue import QueuePoint, WorkQueue


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the replay backend checks, and which failures it injects.

    Captures are numbered from 1, one for each graph: a PIECEWISE recording of a model with n
    splitting ops has n + 1.
    """

    poison_before_replay: bool = False
    """Before each replay fill all memory that the graph made with NaN, integers with a value out of
    range: an op that leaves rows unwritten, or reads results of an earlier step, gives NaN."""

    poison_old_results: bool = False
    """When a step ends, fill the results of the graph step before it with NaN, unless the same
    graph has overwritten them: code that keeps results beyond the next step reads NaN."""

    fail_on_moved_inputs: bool = False
    """Raise MovedTensor at a replay if a tensor that the graph reads has been given other memory
    since the capture. A device would read the old memory."""

    delay: bool = False
    """Run the work of a step only when something waits for it, see `work_queue`: what the engine
    rewrites before that, the step finds rewritten, as a device would."""

    delay_seed: int | None = None
    """With `delay`: let some of the work run earlier, at points that this number determines."""

    fail_on_early_writes: bool = False
    """With `delay`: raise RewrittenEarly where a step reads what was rewritten before it ran, and
    ResultOverwritten where a result is read that a later step has overwritten."""

    failing_captures: frozenset[int] = frozenset()
    """Numbers of captures that fail with a RuntimeError."""

    exhausting_captures: frozenset[int] = frozenset()
    """Numbers of captures that fail with an OutOfMemoryError."""

    graph_bytes: int = 0
    """Bytes charged for each graph beside the memory that it made."""

    limit: int = sys.maxsize
    """Bytes that all graph pools together may take; a capture beyond it is an OutOfMemoryError."""


class ModeledPool:
    """The bytes a shared graph pool would take on a device: the most that captures held at once,
    plus a fixed charge for each graph.

    Captures add up until `release_held`; later captures then use the same bytes again.
    """

    def __init__(self, graph_bytes: int) -> None:
        self._graph_bytes = graph_bytes
        self._graphs: WeakSet[Any] = WeakSet()
        self._held = 0
        self._peak = 0

    @property
    def bytes(self) -> int:
        """As with a device's pool, all of it is freed with the last graph."""
        return self._peak + self._graph_bytes * len(self._graphs) if self._graphs else 0

    def growth(self, made: int) -> int:
        """Growth of `bytes` by one more capture that makes `made` bytes."""
        return max(0, self._held + made - self._peak) + self._graph_bytes

    def add(self, graph: Any, made: int) -> None:
        """`graph` was captured and made tensors of `made` bytes."""
        if not self._graphs:
            self._held = self._peak = 0
        self._graphs.add(graph)
        self._held += made
        self._peak = max(self._peak, self._held)

    def release_held(self) -> None:
        self._held = 0

    def remove(self, graph: Any) -> None:
        self._graphs.discard(graph)


class TapeCapture:
    """A tape that records in this thread."""

    def __init__(self, backend: ReplayBackend, pool: ModeledPool, ownership: Ownership) -> None:
        self._tape = Tape(ownership, backend.options.poison_before_replay)
        self._backend = backend
        self._pool = pool
        backend.see_nothing(True)
        self._tape.start()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._tape.opaque(fn, args)

    def end(self, run: bool = False) -> TapeGraph:
        self._tape.stop()
        if self._tape.refused is not None:
            self._tape.undo()
            raise self._tape.refused
        if self._pool.growth(self._tape.made_bytes) > self._backend.memory().free:
            self._tape.undo()
            raise torch.OutOfMemoryError("this capture would exceed the modeled limit")
        if not run:
            self._tape.finish()
        options = self._backend.options
        graph = TapeGraph(
            self._tape,
            self._backend.counters,
            partial(self._backend.released, self._pool),
            poisons=options.poison_before_replay,
            moved_is_error=options.fail_on_moved_inputs,
        )
        self._pool.add(graph, self._tape.made_bytes)
        return graph

    def abort(self) -> None:
        self._tape.stop()
        self._tape.undo()


@dataclass(slots=True)
class ReplayBackend:
    """Graphs emulated on the CPU. Pass one to `prepare(backend=...)` to choose its options.

    `counters` counts "captures", "replays", "operations" and "preparations". A backend may be
    shared by several prepared models; their pools then share `options.limit`.
    """

    options: ReplayOptions = field(default_factory=ReplayOptions)
    name: str = "replay"
    runs_python: bool = True
    notes_nodes: bool = False
    graph_class: type[Any] | None = None
    counters: Counter[str] = field(default_factory=Counter)
    pools: WeakSet[ModeledPool] = field(default_factory=WeakSet)
    queue: WorkQueue | None = None
    """The work that is delayed."""

    def __post_init__(self) -> None:
        if self.options.delay:
            self.queue = WorkQueue(self.options.delay_seed, self.options.fail_on_early_writes)

    def new_pool(self) -> ModeledPool:
        pool = ModeledPool(self.options.graph_bytes)
        self.pools.add(pool)
        return pool

    def link(self, code: Code, compiled: CompiledModel) -> Code:
        return code if self.queue is None else delayed_code(self.queue, compiled, code)

    def install(self, graph: BoundGraph, compiled: CompiledModel) -> Replay:
        return graph.replay if self.queue is None else delayed_replay(self.queue, compiled, graph)

    @property
    def poison_result(self) -> Callable[[Tensor], object] | None:
        return poison if self.options.poison_old_results else None

    def recording(self, is_open: Callable[[], bool]) -> HostCopies:
        return HostCopies(is_open)

    @property
    def order_steps(self) -> Callable[[], None] | None:
        return self.queue.drain if self.queue is not None else None

    def see_nothing(self, capturing: bool) -> None:
        """While a graph is captured, its operations are not the engine's."""
        if self.queue is not None:
            self.queue.busy = capturing

    def released(self, pool: ModeledPool, graph: TapeGraph, made: Iterable[Tensor]) -> None:
        """A graph that made these tensors is freed: after the work so far, as on a device."""
        self.synchronize()
        if self.queue is not None:
            self.queue.overwritten(made, "the release of its graph")
        pool.remove(graph)

    def prepare(self) -> None:
        self.counters["preparations"] += 1
        self.synchronize()

    def trim(self) -> None:
        pass

    def release_pool(self, pool: ModeledPool) -> None:
        pass  # a tape's memory is gone with the tape

    def may_capture(self) -> bool:
        return True

    def begin(self, pool: ModeledPool, ownership: Ownership) -> TapeCapture:
        self.counters["captures"] += 1
        if self.counters["captures"] in self.options.failing_captures:
            raise RuntimeError("failure injected into this capture")
        if self.counters["captures"] in self.options.exhausting_captures:
            raise torch.OutOfMemoryError("exhaustion injected into this capture")
        return TapeCapture(self, pool, ownership)

    def release_held(self, pool: ModeledPool) -> None:
        self.see_nothing(False)
        pool.release_held()

    def weak(self, tensor: Tensor) -> Tensor:
        # the tape owns what it made; its memory is never given to another
        return normal_alias(tensor) if tensor.is_inference() else tensor

    address = staticmethod(Tensor.data_ptr)

    def memory(self) -> Memory:
        used = sum(pool.bytes for pool in self.pools)
        return Memory(used, self.options.limit - used)

    def working_memory(self, run: Callable[[], None]) -> int:
        return 0  # of a device there is none

    def synchronize(self) -> None:
        if self.queue is not None:
            self.queue.finish()

    def wait(self) -> None:
        self.synchronize()

    def event(self) -> QueuePoint:
        return QueuePoint(self.queue)
