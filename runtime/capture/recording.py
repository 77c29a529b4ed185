"""A recording: what one capture produced, as segments to run in order.

A segment is a graph, or the eager calls of splitting ops between two graphs. An eager call has its
arguments bound once; the tensors it returns are copied to where the next graph reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.locations import user_line
from ...compile.ir.ops import tensors_in
from ...errors import EagerResultChanged, OwnOperators, RecordingReleased
from ...torch_compat.basics.ops import OpOverload, without_frame
from ...torch_compat.basics.tensors import (
    has_own_dispatch,
    has_own_operators,
    storage_id,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from ..backends.ownership import Ownership
from ..backends.protocol import Graph


class SegmentKind(StrEnum):
    GRAPH = "graph"
    EAGER = "eager"


@dataclass(slots=True)
class Segment:
    """One graph, or the splitting ops that run between two graphs.

    `copied` names the ops whose results are copied to fixed memory at each replay; an out-variant
    of the op avoids the copy.
    """

    kind: SegmentKind
    calls: list[Callable[[], None]]
    operations: int = 0
    copied: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    """Of each splitting op, with the module that calls it."""

    def add(self, call: Callable[[], None], name: str, copied: Sequence[str]) -> None:
        """Append the call of one operation."""
        self.calls.append(call)
        self.names.append(name)
        self.operations += 1
        self.copied += copied


class Recording:
    """What one capture produced: `replay()` runs its segments and overwrites its `outputs`.

    `graphs` own the pool's memory, `ownership` holds the tensors from outside that they read.
    `metadata` has the tensors of what it was captured with, by path, until it is in use; `notes`
    are what Python read of it and of the step, see `recorder.Notes`. `bytes` is the growth of
    device memory, `allocated` the part of it in torch's allocator: the driver takes memory for
    executable graphs.
    """

    def __init__(
        self, name: str, segments: list[Segment], graphs: list[Graph], ownership: Ownership
    ) -> None:
        self.name = name
        self.segments = tuple(segments)
        self.graphs = tuple(graphs)
        self.ownership = ownership
        self.outputs: Any = None
        self.metadata: Any = None
        self.notes: Any = None
        self.seconds = 0.0
        self.bytes = self.allocated = 0
        self.calls = tuple(call for segment in segments for call in segment.calls)
        self.replay: Callable[[], None]
        self.link()

    def link(self) -> None:
        """Let `replay` run the calls of the segments."""
        self.replay = self.calls[0] if len(self.calls) == 1 else partial(run_calls, self.calls)

    def facts(self) -> dict[str, Any]:
        """What the event of its capture reports."""
        return {
            "recording": self.name,
            "segments": len(self.segments),
            "operations": self.operations,
            "seconds": self.seconds,
            "bytes": self.bytes,
            "allocated": self.allocated,
            "copied_results": sorted({op for segment in self.segments for op in segment.copied}),
            "python_reads": self.notes.facts() if self.notes else {},
        }

    @property
    def operations(self) -> int:
        return sum(segment.operations for segment in self.segments)

    def release(self) -> None:
        """Free the graphs and their memory. From then on `replay` raises RecordingReleased.

        A replay that the device is still running is not disturbed: the next user of that memory, a
        capture or replay in the same pool, comes after it on the stream.
        """
        for graph in self.graphs:
            graph.release()
        self.segments = self.graphs = self.calls = ()
        self.ownership = Ownership()
        self.outputs = None
        self.replay = partial(_refuse, self.name)


def run_calls(calls: tuple[Callable[[], None], ...]) -> None:
    for call in calls:
        call()


def _refuse(name: str) -> None:
    raise RecordingReleased(name=name)


@dataclass(frozen=True, slots=True)
class ResultForm:
    """What a splitting op returned, without the memory of it."""

    leaves: Sequence[Any]
    spec: Any
    tensors: Mapping[int, tuple[int | None, Callable[..., Tensor]]]
    """By position in `leaves`, what makes a tensor of that form: from the argument with which it
    shares memory, or from nothing."""

    @classmethod
    def of(cls, result: Any, args: Any) -> ResultForm:
        arguments = {storage_id(tensor): at for at, tensor in enumerate(tensors_in(args))}
        leaves, spec = tree_flatten(result)
        tensors: dict[int, tuple[int | None, Callable[..., Tensor]]] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                at = arguments.get(storage_id(leaf))
                form = torch.empty_like(leaf, device="meta", requires_grad=False)
                size, stride, offset = leaf.size(), leaf.stride(), leaf.storage_offset()
                fresh = partial(torch.empty_like, form, device=leaf.device)
                view = partial(torch.as_strided, size=size, stride=stride, storage_offset=offset)
                tensors[position] = at, fresh if at is None else view
                leaves[position] = None
        return cls(leaves, spec, tensors)

    def allocate(self, args: Any) -> tuple[Any, dict[int, Tensor]]:
        """A result of this form for `args`, and those of its tensors that are static memory.

        A tensor that shares memory with an argument has a fixed address already.
        """
        given, leaves = list(tensors_in(args)), list(self.leaves)
        with torch.inference_mode(False), torch.no_grad():
            for position, (at, make) in self.tensors.items():
                leaves[position] = make() if at is None else make(given[at])
        targets = {place: leaves[place] for place, (at, _) in self.tensors.items() if at is None}
        return tree_unflatten(leaves, self.spec), targets


def as_memory(name: str, result: Any) -> Any:
    """`result` with plain tensors, which is all that a graph leaves. Raises OwnOperators."""

    def plain(tensor: Tensor) -> Tensor:
        if has_own_operators(tensor):
            raise OwnOperators(where=user_line(), name=name, kind=type(tensor).__name__)
        return tensor.clone() if has_own_dispatch(type(tensor)) else tensor

    return tree_map_only(Tensor, plain, result)


def eager_call(
    name: str,
    fn: Callable[..., Any],
    static: Any,
    targets: dict[int, Tensor],
    args: Any,
    kwargs: Any,
    of_step: Callable[[], Any] | None = None,
) -> Callable[[], None]:
    """Calls `fn` on static arguments, or those that `of_step` gives, and copies fresh results to
    `targets`, which the next graph reads.

    The call raises EagerResultChanged when a result has another form than at capture, or when one
    that shared memory with an argument no longer does.
    """
    call = partial(without_frame(fn), *args, **kwargs)
    if of_step is not None:
        call = partial(_call_of_step, fn, of_step)
    if static is None and isinstance(fn, OpOverload):  # its schema has no result
        return call
    leaves, expected_spec = tree_flatten(static)
    expected = [_form(leaf, position in targets) for position, leaf in enumerate(leaves)]

    def call_and_copy() -> None:
        leaves, spec = tree_flatten(call())
        got = [_form(leaf, position in targets) for position, leaf in enumerate(leaves)]
        if got != expected or spec != expected_spec:
            raise EagerResultChanged(op=name, got=(got, spec), expected=(expected, expected_spec))
        for position, target in targets.items():
            target.copy_(leaves[position])

    return call_and_copy


def _call_of_step(fn: Callable[..., Any], of_step: Callable[[], Any]) -> Any:
    args, kwargs = of_step()
    return fn(*args, **kwargs)


def _form(leaf: Any, copied: bool) -> Any:
    """What must be equal at capture and replay: shape and dtype of a tensor, its address unless it
    is copied; any other value itself."""
    if not isinstance(leaf, Tensor):
        return leaf
    return tuple(leaf.shape), leaf.dtype, None if copied else leaf.data_ptr()
