"""The tape of the replay backend: tensor operations recorded by a dispatch mode.

While it records, every operation runs (its shapes and indices must be real ones), but nothing of
it stays: what it wrote outside is put back, what it made is poisoned. So a capture does not
execute, as on a GPU. Views cost nothing and are not recorded. The body of a custom op written in
Python runs once and leaves the operators it calls; one that calls none is itself one operation.

What it cannot see: a read on the host that bypasses the dispatcher (`numpy()`, `tolist()`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ....compile.ir.writes import tensors_in, written_by
from ....errors import HostReadInCapture
from ....torch_compat.tensors import storage_id, tree_map_only, without_modes
from ..ownership import Ownership
from ..tensor_tracker import Watch
from .poison import poison
from .tape_operation import Operation, tape_operation

_UNWRITTEN = frozenset(
    {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
_HOST_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


class Tape(Watch):  # type: ignore[no-untyped-call]
    """A watch that records; `finish` or `undo` must follow `stop`."""

    def __init__(self, ownership: Ownership) -> None:
        super().__init__("CPU", ownership)
        self.operations: list[Operation] = []
        self.made: dict[int, Tensor] = {}
        self.host_read: HostReadInCapture | None = None
        self._before: list[tuple[Tensor, Tensor]] = []

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run `func` and record it, unless it is a view, unwritten memory or made of others."""
        if _reads_host(func, args, kwargs):
            self.host_read = HostReadInCapture(op=func)
            raise self.host_read
        used = tensors_in((args, kwargs))
        self.ownership.find(used)
        written = list(written_by(func, args, kwargs))
        self._save(written)
        recorded = len(self.operations)
        result = self.run(func, args, kwargs)
        if len(self.operations) > recorded or torch.Tag.inplace_view in func.tags:
            return result
        fresh = self.fresh(result, used)
        if written or (fresh and func.overloadpacket.__name__ not in _UNWRITTEN):
            self._record(func, args, kwargs, result, fresh)
        return result

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece and record it as one operation.

        It runs twice: a result found in the same memory again is the function's own, not fresh,
        and is neither copied nor poisoned. Both times it finds the same in its arguments, which it
        may use as scratch memory.
        """
        with without_modes():
            used = tensors_in(args)
            self.ownership.find(used)
            given = self._save(used)
            kept = fn(*args)
            _put_back(given)
            result = fn(*args)
            fresh = self.fresh(result, used + tensors_in(kept))
            self._record(fn, args, {}, result, fresh)
        return result

    def fresh(self, result: Any, used: list[Tensor]) -> list[Tensor]:
        fresh = super().fresh(result, used)
        for tensor in fresh:
            whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
            self.made.setdefault(storage_id(tensor), whole)
        return fresh

    def _record(
        self, fn: Callable[..., Any], args: Any, kwargs: Any, result: Any, fresh: list[Tensor]
    ) -> None:
        args, kwargs = tree_map_only(Tensor, torch.Tensor.detach, (args, kwargs))
        self.operations.append(tape_operation(partial(fn, *args, **kwargs), result, fresh))

    def _save(self, tensors: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What tensors hold before something may write to them; for those from outside, kept."""
        contents = [(tensor.detach(), tensor.clone()) for tensor in tensors]
        self._before += [each for each in contents if storage_id(each[0]) not in self.made]
        return contents

    @property
    def made_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.made.values())

    def finish(self) -> None:
        """Leave no trace of having run: written tensors as before, made ones poisoned."""
        self.undo()
        with torch.inference_mode():
            for tensor in self.made.values():
                poison(tensor)

    def undo(self) -> None:
        """Put back what tensors from outside held."""
        _put_back(self._before[::-1])
        self._before.clear()


def _put_back(contents: list[tuple[Tensor, Tensor]]) -> None:
    """Let tensors hold again what they held; along a dimension of stride 0 that is one element."""
    with torch.inference_mode():
        for tensor, before in contents:
            for dim, step in enumerate(tensor.stride()):
                if step == 0 and tensor.size(dim):
                    tensor, before = tensor.narrow(dim, 0, 1), before.narrow(dim, 0, 1)
            tensor.copy_(before)


def _reads_host(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether `func` would have to wait for a value: its result or the result's shape needs it."""
    if _HOST_READS.isdisjoint(func.tags):
        return False
    if func.overloadpacket is torch.ops.aten.index:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return kwargs.get("output_size") is None
