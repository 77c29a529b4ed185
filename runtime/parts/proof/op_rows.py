"""What each operator of a run does: the first one whose real rows depend on padding is where rows
mix. Compiled code is not seen op by op, the source of its piece is."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ....compile.guards.tolerance import differences, precision
from ....compile.ir.locations import lines_of, user_line
from ....compile.ir.ops import tensors_in, written_by
from ....torch_compat.basics.tensors import TorchDispatchMode, storage_id

_SOURCE = "<source of a piece>"


class OpRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of each operator, and the user's line: of the source of a piece, if it is
    stated, by its comments."""

    def __init__(self, source: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[tuple[str | None, list[Tensor]]] = []
        self.written_at: str | None = None
        """The line of the first op that writes to an argument of the piece."""
        self._source = source
        self._given = set[int]()
        self._places = [place for _, place in lines_of(source)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        where = self._place() if self._source else user_line()
        written = written_by(func, args, kwargs or {})
        if self.written_at is None and not self._given.isdisjoint(map(storage_id, written)):
            self.written_at = where
        self.ops.append((where, [tensor.clone() for tensor in tensors_in(result)]))
        return result

    def interpreted(self, args: list[Any]) -> Any:
        """Run the source of the piece."""
        self._given = set(map(storage_id, tensors_in(args)))
        with self:
            return run_source(self._source, args)

    def first_other_row(self, padded: OpRows, limit: Callable[[float], float]) -> str | None:
        """The line of the first op of which a row is another one in the padded run."""
        for (where, alone), (_, rows) in zip(self.ops, padded.ops, strict=False):
            for one, other in zip(alone, rows, strict=False):
                if one.dim() == other.dim():
                    real = other[tuple(slice(size) for size in one.shape)]
                    if one.shape != real.shape or beyond(one, real, limit).any():
                        return where
        return None

    def _place(self) -> str | None:
        frame = sys._getframe()
        while frame.f_code.co_filename != _SOURCE:
            if frame.f_back is None:
                return None
            frame = frame.f_back
        return self._places[frame.f_lineno - 1]


class OnlyComputes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises RuntimeError before an operator draws random numbers or writes to one of `args`, as
    one of others may."""

    def __init__(self, args: list[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = set(map(storage_id, tensors_in(args)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = written_by(func, args, kwargs or {})
        foreign = func.namespace not in ("aten", "prims")
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if foreign or draws or not self._given.isdisjoint(map(storage_id, written)):
            raise RuntimeError(f"{func} does more than compute")
        return func(*args, **(kwargs or {}))


def run_source(source: str, args: list[Any]) -> Any:
    """Run the source of a piece."""
    names = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(compile(source, _SOURCE, "exec"), names)
    return names["Piece"].forward(None, *args)  # type: ignore[attr-defined]


_SUBTRACTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that compute: rows that are clearly equal need no float64."""


def beyond(one: Tensor, other: Tensor, limit: Callable[[float], float]) -> Tensor:
    """The rows that differ by more than the limit, which depends on the precision of the dtype."""
    eps = precision(one.dtype) if one.dtype.is_floating_point or one.dtype.is_complex else 1.0
    if one.dtype in _SUBTRACTED and one.dim() > 1 and one.numel() and one.shape == other.shape:
        apart, size = ((each.abs().flatten(1).amax(1)) for each in (one - other, one))
        if bool((apart <= limit(eps) / 2 * size).all()):  # not if one is NaN
            return torch.zeros(len(one), dtype=torch.bool, device="cpu")
    return differences(one, other) * eps > limit(eps)
