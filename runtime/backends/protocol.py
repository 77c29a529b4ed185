"""What a graph backend must do. "replay" and "cuda" are built in; others use an entry point.

A backend begins a capture into a memory pool and ends it with a graph. Segments, sessions,
lifetimes and address checks are built on these protocols and are the same for every accelerator.
Nothing else is asked of a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from ...compile.plan.compiled_model import CompiledModel
from .ownership import Ownership

Code = Callable[..., tuple[Any, ...]]
"""From a plan's inputs to its results."""

Sizes = tuple[int, ...]
"""The real size of each symbol of a plan."""

Mark = Callable[[], None]
"""Called when the copies of a step's inputs are queued, before the rest of the step."""

Load = Callable[[tuple[Any, ...]], None]
"""Copies a step's inputs into static memory."""

FreshResults = tuple[Callable[[], Any], ...]
"""A function for each result: a new tensor on static memory, so that what a caller does to it,
such as `unsqueeze_`, changes no later step."""

Replay = Callable[[tuple[Any, ...], Sizes, Mark], Sequence[Any]]
"""Runs a graph on a step's inputs; returns the real rows of the static results."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the backend's device.

    `used` by this process's tensors and graphs, cached memory included; `free` for any process;
    `other`: taken by the driver, such as for executable graphs, and by other processes.
    """

    used: int
    free: int
    other: int = 0

    @property
    def taken(self) -> int:
        return self.used + self.other

    @property
    def total(self) -> int:
        return self.taken + self.free

    def growth(self, before: Memory) -> int:
        """Bytes taken since: the larger of what the allocator and what the device says."""
        return max(self.used - before.used, self.taken - before.taken)


@dataclass(frozen=True, slots=True)
class Argument:
    """Memory that a node of a graph reads or writes. `is_made`: it is of the graph's pool."""

    address: int
    is_made: bool
    shape: Sequence[int] | None
    """Where it is known."""


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of a graph: the operator that added it, and what the device's driver tells of it."""

    op: str
    arguments: Sequence[Argument]
    kind: str = "call"
    kernel: str = ""
    launch: Mapping[str, Any] = field(default_factory=dict)
    """Of a kernel its grid and block; of a copy or fill the bytes."""
    unread: str = ""
    """Why there may be arguments that are not known."""


@dataclass(frozen=True, slots=True)
class GraphPart:
    """The nodes of a compiled piece in order, or of what runs between two of them."""

    is_piece: bool
    nodes: list[GraphNode]


class Graph(Protocol):
    """What one capture recorded; it owns the pool memory that the capture allocated."""

    @property
    def operations(self) -> int:
        """Kernels, copies and fills recorded; a graph with none need not be replayed."""

    @property
    def replay(self) -> Callable[[], None]:
        """Run the recorded work on the recorded addresses."""

    @property
    def parts(self) -> Sequence[GraphPart]:
        """Its nodes in order; none where the backend did not note them, see `notes_nodes`."""

    def release(self) -> None:
        """Drop the graph and its memory; it cannot be replayed after that."""


class Capture(Protocol):
    """A capture that is open in the calling thread."""

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece inside the capture; it may become one operation."""

    def end(self, run: bool = False) -> Graph:
        """Close the capture. It is closed also when this raises because it gave no valid graph.

        `run` is true only for a backend that runs Python: leave in memory what one replay leaves,
        which the Python after it reads.
        """

    def abort(self) -> None:
        """Drop the capture after an error; does not raise for a capture that is already invalid."""


class DeviceEvent(Protocol):
    """A point in the work of a device, such as a `torch.cuda.Event`."""

    def query(self) -> bool:
        """Whether it was reached."""

    def synchronize(self) -> None:
        """Wait for it on the host."""

    def wait(self, stream: Any = None) -> None:
        """Let a stream, the current one by default, wait for it."""


class BoundGraph(Protocol):
    """All graphs of one recording with the static inputs that they read.

    A step loads its inputs, makes the `calls` and copies back what they wrote to inputs.
    """

    @property
    def calls(self) -> Sequence[Callable[[], None]]:
        """In order: `replay` of each of the backend's graphs, and the splitting ops in between."""

    @property
    def outputs(self) -> Any:
        """The static results."""

    @property
    def copied_inputs(self) -> Sequence[Tensor]:
        """The static inputs that a step's are copied to."""

    def at(self, sizes: Sizes) -> tuple[Load, FreshResults]:
        """What loads inputs of these sizes, and the results of that many rows.

        Raises BatchExceeded for sizes above the padded ones.
        """

    def copy_back(self, tensors: tuple[Any, ...]) -> None:
        """Copy what the calls wrote to static inputs to `tensors`, the inputs of the step."""

    def replay(self, tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        """All of a step, at once: a `Replay`."""


class GraphBackend(Protocol):
    """A way to capture and replay on one device. Several prepared models may share one."""

    name: str
    runs_python: bool
    """Whether a replay runs Python of the captured region again, as an emulation does."""

    notes_nodes: bool
    """Whether graphs that are captured from now on must have `parts`."""

    @property
    def graph_class(self) -> type[Any] | None:
        """The class, such as `torch.cuda.CUDAGraph`, whose `capture_begin` begins each capture;
        None if captures do not begin so."""

    def new_pool(self) -> Any:
        """A handle of new memory that captures share."""

    def prepare(self) -> None:
        """Synchronize the device and flush its caches: once per capture session."""

    def trim(self) -> None:
        """Give cached memory that no tensor and no graph uses back to the device."""

    def release_pool(self, pool: Any) -> None:
        """Give the memory of `pool` back to the device. Its graphs were released before."""

    @property
    def order_steps(self) -> Callable[[], None] | None:
        """Called before a step writes to static memory: what the last step queued comes before.
        None where there is no queue."""

    def link(self, code: Code, compiled: CompiledModel) -> Code:
        """What a step calls to run without a graph: `code`, which is that of `compiled`, or what
        runs it later."""

    def install(self, graph: BoundGraph, compiled: CompiledModel) -> Replay:
        """What a step calls to replay `graph`, recorded from `compiled`: `graph.replay`, or what
        makes its calls later."""

    @property
    def poison_result(self) -> Callable[[Tensor], object] | None:
        """Overwrites a static result after the next step of the model, if that was another graph's:
        code that has kept the result must not find its values. None where nothing does."""

    def recording(self, is_open: Callable[[], bool]) -> AbstractContextManager[Any]:
        """Entered while a function is recorded by captures of this thread, one after the other.

        While `is_open()`, one of them is open. Here an emulation refuses what a device would.
        """

    def may_capture(self) -> bool:
        """Whether a step may capture first: it is not itself captured, by the engine."""

    def begin(self, pool: Any, ownership: Ownership) -> Capture:
        """Open a capture into `pool`, in which nobody else's work can get.

        The capture records in `ownership` which tensors it makes and which it finds.
        """

    def release_held(self, pool: Any) -> None:
        """Tensors of earlier captures are no longer held: later ones may use their memory."""

    def weak(self, tensor: Tensor) -> Tensor:
        """An alias of `tensor`, which a graph made, that lets later captures use its memory."""

    def address(self, tensor: Tensor) -> int:
        """Device address of the first element."""

    def memory(self) -> Memory:
        """Bytes used and free now."""

    def working_memory(self, run: Callable[[], None]) -> int:
        """Bytes that `run` takes while it runs, beyond what stays. 0 where it is not known."""

    def synchronize(self) -> None:
        """Wait for all work of the device."""

    def wait(self) -> None:
        """Wait for the work of the current stream."""

    def event(self) -> DeviceEvent:
        """The end of the work that was queued so far."""
