"""The replay backend: graphs on a CPU, with the semantics of a device that matter.

An honest emulation, made for tests: fixed addresses, outputs that the next replay overwrites,
Python that does not run again, captures that do not execute, and memory that can run out.
What would be silent garbage on a device can be made loud with `ReplayOptions`.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from ....errors import MovedTensor
from ..ownership import Ownership
from ..protocol import Memory
from .poison import poison
from .pool import ModelledPool
from .tape import Tape


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What the emulation adds to make misuse and misfortune visible.

    Captures are counted from 1, one for each graph. `graph_bytes` is charged for each graph,
    beside the memory it made; `limit` bounds the sum over all pools.
    """

    poison_before_replay: bool = False
    fail_on_moved_inputs: bool = False
    failing_captures: frozenset[int] = frozenset()
    exhausting_captures: frozenset[int] = frozenset()
    graph_bytes: int = 0
    limit: int = sys.maxsize


class TapeGraph:
    """A tape that is wound: its operations run in order on the recorded memory."""

    def __init__(self, tape: Tape, backend: ReplayBackend, pool: ModelledPool) -> None:
        self._operations = tuple(tape.operations)
        self._made = tuple(tape.made.values())
        self._ownership = tape.ownership
        self._options = backend.options
        self._counters = backend.counters
        self._pool = pool
        pool.add(self, tape.made_bytes)

    @property
    def operations(self) -> int:
        return len(self._operations)

    def replay(self) -> None:
        if torch.is_inference_mode_enabled():
            self._run()
        else:
            with torch.inference_mode():  # inference tensors may be written in this mode alone
                self._run()

    def _run(self) -> None:
        self._counters["replays"] += 1
        self._counters["operations"] += len(self._operations)
        if self._options.fail_on_moved_inputs:
            self._check_inputs()
        if self._options.poison_before_replay:
            for tensor in self._made:
                poison(tensor)
        for operation in self._operations:
            operation()

    def _check_inputs(self) -> None:
        for recorded, tensor in self._ownership.moved():
            name = f"a captured {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            raise MovedTensor(name=name, recorded=hex(recorded), now=hex(tensor.data_ptr()))

    def release(self) -> None:
        self._operations = ()
        self._made = ()
        self._pool.remove(self)


class TapeCapture:
    """A tape that records in this thread."""

    def __init__(self, backend: ReplayBackend, pool: ModelledPool, ownership: Ownership) -> None:
        self._tape = Tape(ownership)
        self._backend = backend
        self._pool = pool
        self._tape.start()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return self._tape.opaque(fn, args)

    def end(self) -> TapeGraph:
        self._tape.stop()
        if self._tape.host_read is not None:
            self._tape.undo()
            raise self._tape.host_read
        if self._pool.growth(self._tape.made_bytes) > self._backend.memory().free:
            self._tape.undo()
            raise torch.OutOfMemoryError("this capture would exceed the modelled limit")
        self._tape.finish()
        return TapeGraph(self._tape, self._backend, self._pool)

    def abort(self) -> None:
        self._tape.stop()
        self._tape.undo()


@dataclass(slots=True)
class ReplayBackend:
    """Graphs emulated on the CPU; `counters` holds captures, replays, operations, preparations."""

    options: ReplayOptions = field(default_factory=ReplayOptions)
    name: str = "replay"
    counters: Counter[str] = field(default_factory=Counter)
    pools: WeakSet[ModelledPool] = field(default_factory=WeakSet)

    def new_pool(self) -> ModelledPool:
        pool = ModelledPool(self.options.graph_bytes)
        self.pools.add(pool)
        return pool

    def prepare(self) -> None:
        self.counters["preparations"] += 1

    def capture_stream(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def begin(self, pool: ModelledPool, ownership: Ownership) -> TapeCapture:
        self.counters["captures"] += 1
        if self.counters["captures"] in self.options.failing_captures:
            raise RuntimeError("failure injected into this capture")
        if self.counters["captures"] in self.options.exhausting_captures:
            raise torch.OutOfMemoryError("exhaustion injected into this capture")
        return TapeCapture(self, pool, ownership)

    def settle(self, pool: ModelledPool) -> None:
        pool.settle()

    def weak(self, tensor: Tensor) -> Tensor:
        return tensor  # the tape owns what it made; nothing is carved again

    address = staticmethod(Tensor.data_ptr)

    def memory(self) -> Memory:
        used = sum(pool.bytes for pool in self.pools)
        return Memory(used, self.options.limit - used)

    def synchronize(self) -> None:
        pass
