"""The tape of the replay backend: tensor operations recorded by a dispatch mode.

While it records, every operation runs, since shapes and indices must be real, but leaves no trace:
what it wrote outside is restored, what it made is poisoned. So a capture does not execute, as on a
GPU. Views are not recorded. The body of a custom op written in Python runs once and leaves the
operators it calls; an op that calls none is itself one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....compile.ir.locations import user_line
from ....compile.ir.ops import tensors_in, written_by
from ....errors import HostReadInCapture, OwnOperators
from ....torch_compat.basics.ops import (
    OpOverload,
    awaited,
    is_collective,
    is_composite,
    is_higher_order,
    is_in_python,
    returns_early,
    returns_nothing,
)
from ....torch_compat.basics.tensors import (
    detached,
    has_own_dispatch,
    storage_id,
    tree_map_only,
    without_modes,
    write_back,
)
from ..ownership import (
    ALLOCATIONS,
    TORCH_NAMESPACES,
    Ownership,
    TensorTracker,
    memory_of,
)
from .host_copies import ValueReads

Operation = partial[Any]


class Tape(TensorTracker):
    """A tracker that records; call `finish` or `undo` after `stop`."""

    def __init__(self, ownership: Ownership, strict: bool = False) -> None:
        super().__init__("CPU", ownership)
        self._strict = strict
        self.operations: list[Operation] = []
        self.made: dict[int, Tensor] = {}
        self._before: list[tuple[Any, ...]] = []
        """Arguments of `write_back`."""
        self._value_reads: list[HostReadInCapture] = []
        self._ops_in_pieces = 0

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run `func`; record it unless it is a view, makes unwritten memory, or called others.

        One that returns nothing is an assertion, if it is not written in Python.
        """
        with torch.DisableTorchFunction():  # modes for functions are for the model alone
            used = memory_of((args, kwargs))
            self.refuse(func, args, kwargs, used)
            self.ownership.find(used, self.bakes, user_line)
            written = memory_of(list(written_by(func, args, kwargs)))
            self._save(written, _rows_written(func, args))
        recorded = len(self.operations)
        result = self.run(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags:
            return result
        if len(self.operations) > recorded:
            if is_composite(func) or is_in_python(func):
                return result
            del self.operations[recorded:]  # a kernel in C++ does more than call operators
        acts = written or returns_nothing(func)
        with torch.DisableTorchFunction():
            fresh = self.fresh(result, used)
            if acts or (fresh and func.overloadpacket.__name__ not in ALLOCATIONS):
                call = partial(awaited, func) if returns_early(func) else func
                self._record(call, args, kwargs, result, fresh)
        return result

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece and record it as one operation.

        It may use its arguments as scratch memory, but for constant ones.
        """
        with without_modes():
            with torch.DisableTorchFunction():  # modes for functions are for the piece alone
                used = memory_of(args)
                self.ownership.find(used, self.bakes)
                self._save(used)
            result = self.seen(fn, args)
            for tensor in tensors_in(result):
                if has_own_dispatch(kind := type(tensor)):  # a replay copies memory alone
                    raise OwnOperators(name="a piece", kind=kind.__name__)
            with torch.DisableTorchFunction():
                self.fresh(result, used)
                given = {storage_id(tensor) for tensor in used}
                # each run of an op in the piece may write to another buffer of its own
                chosen = [each for each in memory_of(result) if storage_id(each) not in given]
                self._record(fn, args, {}, result, chosen)
        return result

    def refuse(self, func: OpOverload, args: Any, kwargs: Any, used: Sequence[Tensor]) -> None:
        super().refuse(func, args, kwargs, used)
        if is_collective(func):
            self.ownership.before_collective(str(func))

    def refuse_in_piece(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        self.ownership.refuse_left((args, kwargs))
        self._ops_in_pieces += is_higher_order(func) or not func.is_view
        super().refuse_in_piece(func, args, kwargs)

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        run = partial(super().run, func, args, kwargs)
        if func.namespace in TORCH_NAMESPACES:
            return run()
        return self._kernel(run, lambda: len(self.operations))

    def kernel_in_piece(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        run = partial(self.kernel, func, args, kwargs)
        return self._kernel(run, lambda: self._ops_in_pieces)

    def _kernel(self, run: Callable[[], Any], count: Callable[[], int]) -> Any:
        """Run the body of an op. Operators that it calls are given what it read on the host:
        HostReadInCapture. One that calls none is a kernel of the host, such as one in numpy."""
        outer, before, self._value_reads = self._value_reads, count(), []
        with ValueReads(lambda read: self._value_reads.append(read)):
            result = run()
        reads, self._value_reads = self._value_reads, outer
        if reads and count() > before:
            self.refused = self.refused or reads[0]
            raise reads[0]
        return result

    def bakes(self, tensor: Tensor) -> bool:
        """A device graph would have the value, if the tensor was not moved with the model."""
        return self._strict and tensor.dim() == 0

    def fresh(self, result: Any, used: list[Tensor]) -> list[Tensor]:
        fresh = super().fresh(result, used)
        for tensor in fresh:
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            whole.set_(tensor.untyped_storage())
            self.made.setdefault(storage_id(tensor), whole)
        return fresh

    def _record(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, result: Any, fresh: list[Tensor]
    ) -> None:
        args, kwargs = tree_map_only(Tensor, detached, (args, kwargs))
        self.operations.append(_operation(partial(fn, *args, **kwargs), result, fresh))

    def _save(self, tensors: list[Tensor], rows: tuple[int, Tensor] | None = None) -> None:
        """Keep for `undo` what tensors from outside hold that may be written: all or some rows."""
        for tensor in tensors:
            if storage_id(tensor) in self.made or self.ownership.is_constant(tensor):
                continue
            if rows is None:
                self._before.append((tensor.detach(), tensor.clone()))
            else:
                dim, index = rows[0], rows[1].remainder(tensor.size(rows[0]))
                content = tensor.index_select(dim, index)
                self._before.append((tensor.detach(), content, dim, index))

    @property
    def made_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.made.values())

    def finish(self) -> None:
        """Leave no trace of having run: restore written tensors, poison those that were made."""
        self.undo()
        with torch.inference_mode():
            for tensor in self.made.values():
                poison(tensor)

    def undo(self) -> None:
        """Restore what tensors from outside held."""
        for saved in reversed(self._before):
            write_back(*saved)
        self._before.clear()


def _rows_written(func: OpOverload, args: Any) -> tuple[int, Tensor] | None:
    """The dimension and the rows, if `func` writes to some rows alone: as large as a KV cache is,
    no more of it is copied."""
    if func is torch.ops.aten.index_copy_.default:
        return args[1], args[2]
    if func is torch.ops.aten.index_put_.default:
        stated = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if len(stated) == 1 and stated[0][1].dim() == 1 and stated[0][1].dtype is torch.int64:
            return stated[0]
    return None


def _operation(call: Operation, result: Any, fresh: list[Tensor]) -> Operation:
    """`call`, with its fresh results copied to where the recorded `result` was.

    The common forms, one tensor and a flat tuple, avoid walking a tree. Expanded rows, of stride 0,
    are one row in memory.
    """
    if not fresh:
        return call
    owned = {storage_id(tensor) for tensor in fresh}
    places = [t.detach() if storage_id(t) in owned else None for t in tensors_in(result)]
    copied = [place for place in places if place is not None]
    if any(0 in place.stride() for place in copied):
        return partial(_copy_tree, call, places)
    if isinstance(result, Tensor):
        return partial(_copy_one, call, copied[0])
    if len(copied) == len(result) and all(isinstance(item, Tensor) for item in result):
        return partial(_copy_flat, call, copied)
    return partial(_copy_tree, call, places)


def _copy_one(call: Callable[[], Tensor], place: Tensor) -> None:
    place.copy_(call())


def _copy_flat(call: Callable[[], tuple[Tensor, ...]], places: list[Tensor]) -> None:
    for place, value in zip(places, call(), strict=True):
        place.copy_(value)


def _copy_tree(call: Callable[[], Any], places: list[Tensor | None]) -> None:
    for place, value in zip(places, tensors_in(call()), strict=True):
        if place is not None:
            write_back(place, value)


COPIES = frozenset({_copy_one, _copy_flat, _copy_tree})
"""What calls an operation and copies its results to fixed memory."""


def poison(tensor: Tensor) -> Tensor:
    """`tensor`, overwritten with NaN, or if of integers with the value farthest out of range."""
    if tensor.dtype.is_floating_point and tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)  # NaN in the 8-bit formats with a sign and a NaN
    elif tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min or limits.max)
    return tensor
