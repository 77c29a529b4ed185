"""What each operator of a run does: the first one whose real rows depend on padding is where rows
mix. Compiled code is not seen op by op, the source of its piece is.

Inputs may not lead to the data for which padding reaches a real row, as a ranking that is full, or
an expert that has no room. Such a run has other values in the padding of what operators compute. It
computes in more bits than the model does, whose rounding hides what padding changes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....compile.guards.tolerance import precision, relative_differences
from ....compile.ir.locations import lines_of, user_line
from ....compile.ir.ops import tensors_in, written_by
from ....torch_compat.basics.tensors import LightDispatchMode, storage_id, tree_map_only
from ...backends.ownership import ALLOCATIONS

_SOURCE = "<source of a piece>"

Dtypes = Mapping[torch.dtype, torch.dtype]
"""By dtype the one to compute in instead."""


class _Op(NamedTuple):
    func: Any
    where: str | None
    """The user's line."""
    results: list[Tensor]


class OpRows(LightDispatchMode):
    """Keeps the results of each operator, and the user's line: of the source of a piece, if it is
    stated, by its comments. With other `dtypes` it computes as `in_other_dtypes`."""

    sees_inside = True

    def __init__(self, source: str = "", dtypes: Mapping[torch.dtype, torch.dtype] = {}) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes = dtypes
        self.ops: list[_Op] = []
        self.written_at: str | None = None
        """The line of the first op that writes to an argument of the piece."""
        self._source = source
        self._given = set[int]()
        self._places = [place for _, place in lines_of(source)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.dtypes:
            result = in_other_dtypes(self.dtypes, func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ALLOCATIONS:
            for tensor in tensors_in(result):
                tensor.zero_()
        where = self._place() if self._source else user_line()
        written = written_by(func, args, kwargs or {})
        if self.written_at is None and not self._given.isdisjoint(map(storage_id, written)):
            self.written_at = where
        self.ops.append(_Op(func, where, self._kept(func, (args, kwargs), tensors_in(result))))
        return result

    def _kept(self, func: Any, given: Any, results: list[Tensor]) -> list[Tensor]:
        return [tensor.clone() for tensor in results]

    def interpreted(self, args: list[Any]) -> Any:
        """Run the source of the piece."""
        self._given = set(map(storage_id, tensors_in(args)))
        with self:
            return run_source(self._source, args)

    def first_other_row(self, padded: OpRows, limit: Callable[[float], float]) -> str | None:
        """The line of the first op of which a row is another one in the padded run."""
        return next(self._other_rows(padded, limit), None)

    def has_other_row(self, padded: OpRows, limit: Callable[[float], float]) -> bool:
        return any(True for _ in self._other_rows(padded, limit))

    def _other_rows(self, padded: OpRows, limit: Callable[[float], float]) -> Iterator[str | None]:
        for op, other_op in zip(self.ops, padded.ops, strict=False):
            for one, other in zip(op.results, other_op.results, strict=False):
                if one.dim() == other.dim():
                    real = other[box(one.shape)]
                    if one.shape != real.shape or beyond(one, real, limit).any():
                        yield op.where

    def _place(self) -> str | None:
        frame = sys._getframe()
        while frame.f_code.co_filename != _SOURCE:
            if frame.f_back is None:
                return None
            frame = frame.f_back
        return self._places[frame.f_lineno - 1]


class _Rows(NamedTuple):
    """Of a result with one dimension of rows: its real rows, a number for each row by which two
    runs are compared, and how many of its rows one row of padding has."""

    dim: int
    real: Tensor
    numbers: Tensor
    each: int


class _Replaced(NamedTuple):
    """Of a result that is computed by row: its real rows, and which of all rows are replaced."""

    dim: int
    real: Tensor
    rows: Tensor


class PaddedOps(OpRows):
    """A run of the operators of `alone` on inputs with `padding` rows behind the real ones. It
    keeps the real rows of each result.

    With `others` it replaces their rows by real rows times `factor`. Real rows that differ from
    those of `others` by rounding alone are set to them, so that no close decision changes.
    """

    def __init__(
        self,
        source: str,
        alone: OpRows,
        padding: int,
        others: Mapping[tuple[int, int], _Replaced] | None = None,
        factor: float = 1.0,
    ) -> None:
        super().__init__(source, alone.dtypes)
        self._alone, self._padding = alone.ops, padding
        self._others, self._factor = others, factor
        self._rows: dict[tuple[int, int], _Rows] = {}

    def computed_by_row(self, other: PaddedOps) -> dict[tuple[int, int], _Replaced]:
        """The results whose rows differ in `other` if their inputs do: not the real rows, and not
        the last row of padding, whose inputs are the same. By operator and result."""
        found = {}
        for place, (dim, real, numbers, each) in self._rows.items():
            if place in other._rows and numbers.shape == other._rows[place].numbers.shape:
                apart = ~torch.isclose(numbers, other._rows[place].numbers, 1e-2, 0.0, True)
                if apart.any() and not (apart[: real.shape[dim]].any() or apart[-each:].any()):
                    found[place] = _Replaced(dim, real, apart)
        return found

    def _kept(self, func: Any, given: Any, results: list[Tensor]) -> list[Tensor]:
        at = len(self.ops)
        if at == len(self._alone) or self._alone[at].func is not func:
            self._alone = self._alone[:at]  # these runs go on apart
            return []
        memory, kept = set(map(storage_id, tensors_in(given))), list[Tensor]()
        for number, (one, tensor) in enumerate(zip(self._alone[at].results, results, strict=False)):
            real = tensor[box(one.shape)] if one.dim() == tensor.dim() else tensor
            dims = [d for d, n in enumerate(tensor.shape) if real.shape[d] != n]
            is_made = storage_id(tensor) not in memory
            if len(dims) == 1 and is_made and _is_replaced(func, tensor, given):
                if self._others is None:
                    self._note_rows((at, number), dims[0], one, tensor, real)
                elif (at, number) in self._others:
                    self._replace(tensor, real, self._others[at, number])
            kept.append(real.clone())
        return kept

    def _note_rows(
        self, place: tuple[int, int], dim: int, one: Tensor, tensor: Tensor, real: Tensor
    ) -> None:
        """Unless the `real` rows of a result lie elsewhere, as rows that are grouped by expert."""
        if not beyond(one, real, other_size).any():
            each = (tensor.shape[dim] - one.shape[dim]) // self._padding
            self._rows[place] = _Rows(dim, real.clone(), _numbers(tensor, dim), max(1, each))

    def _replace(self, tensor: Tensor, real: Tensor, others: _Replaced) -> None:
        is_other_size = len(others.rows) != tensor.shape[others.dim]
        if is_other_size or beyond(others.real, real, same_size).any():
            return
        real.copy_(others.real)
        floats = tensor.is_floating_point()
        if floats and bool((real == real.trunc()).all()):
            return  # counts and places, which another row must not have
        rows = tensor.movedim(others.dim, 0)
        at = others.rows.nonzero().flatten()
        values = real.movedim(others.dim, 0)
        rows[at] = values[at % len(values)] * (self._factor if floats else 1)


def wider_dtypes() -> Dtypes:
    """The dtype to compute in instead of another one whose rounding hides what padding changes; of
    float32, too, where a device may compute its products in TF32."""
    short = (torch.float16, torch.bfloat16)
    if precision(torch.float32) == torch.finfo(torch.float32).eps:
        return dict.fromkeys(short, torch.float32)
    return dict.fromkeys((*short, torch.float32), torch.float64)


def in_other_dtypes(dtypes: Dtypes, func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator gives if floats are of other `dtypes`. Views are as they are, and so are
    memory that it writes, and an operator that takes no other dtype."""
    if func.is_view:
        return func(*args, **kwargs)

    def other(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(dtypes.get(value.dtype, value.dtype))
        return dtypes.get(value, value)

    if written := [each.dtype for each in written_by(func, args, kwargs) if each.dtype in dtypes]:

        def as_memory(value: Tensor) -> Tensor:
            return value.to(written[0]) if value.dtype in dtypes.values() else value

        try:
            return func(*args, **kwargs)
        except RuntimeError:  # values have to be of the dtype of the memory
            return func(*tree_map_only(Tensor, as_memory, args), **kwargs)
    given = [tensor.dtype.is_floating_point for tensor in tensors_in((args, kwargs))]
    if sum(given) == 1 < len(given):  # moves rows of what may be a large table
        return tree_map_only(Tensor, other, func(*args, **kwargs))
    try:
        converted = tree_map_only((Tensor, torch.dtype), other, (args, kwargs))
        return func(*converted[0], **converted[1])
    except RuntimeError:
        return func(*args, **kwargs)


def _is_replaced(func: Any, tensor: Tensor, given: Any) -> bool:
    """Floats, and integers made of them: these may point to rows of a table."""
    if tensor.is_floating_point():
        return tensor.itemsize > 1
    cast = func.overloadpacket.__name__ == "_to_copy" and tensor.dtype != torch.bool
    return cast and tensors_in(given)[0].is_floating_point()


def _numbers(tensor: Tensor, dim: int) -> Tensor:
    """A number for each row, which another row hardly has."""
    rows = tensor.movedim(dim, 0).reshape(tensor.shape[dim], -1).float()
    return rows @ torch.arange(rows.shape[1], dtype=torch.float32, device=rows.device).add(1).sin()


def box(shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(size) for size in shape)


class OnlyComputes(LightDispatchMode):
    """Raises RuntimeError before an operator draws random numbers or writes to one of `args`, as
    one of others may."""

    sees_inside = True

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


@lru_cache(maxsize=1)
def _code(source: str) -> Any:
    return compile(source, _SOURCE, "exec")


def run_source(source: str, args: list[Any]) -> Any:
    """Run the source of a piece."""
    names = {"torch": torch, "device": torch.device, "inf": math.inf, "nan": math.nan}
    exec(_code(source), names)
    return _module(names["Piece"]).forward(*args)  # type: ignore[arg-type]


def _module(kind: type[torch.nn.Module]) -> Any:
    """A module of a class in the source of a piece. Those inside are its modules: an operator of
    higher order calls them."""
    module = kind()
    for name, inner in [*vars(kind).items()]:
        if isinstance(inner, type):
            delattr(kind, name)
            setattr(module, name, _module(inner))
    return module


def other_size(eps: float) -> float:
    """That of kernels of another size."""
    return max(1e-2, 16 * eps)


def same_size(eps: float) -> float:
    """The largest difference relative to the largest element of a row, by the dtype's precision.
    Rows that are grouped by expert are multiplied in groups whose sizes depend on other rows."""
    return 64 * eps


_SUBTRACTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that compute: rows that are clearly equal need no float64."""


def beyond(one: Tensor, other: Tensor, limit: Callable[[float], float]) -> Tensor:
    """The rows that differ by more than the limit, which depends on the precision of the dtype."""
    if one.dtype in _SUBTRACTED and one.dim() > 1 and one.numel() and one.shape == other.shape:
        apart, size = ((each.abs().flatten(1).amax(1)) for each in (one - other, one))
        if bool((apart <= limit(precision(one.dtype)) / 2 * size).all()):  # not if one is NaN
            return torch.zeros(len(one), dtype=torch.bool, device="cpu")
    relative, eps = relative_differences(one, other)
    return relative > limit(eps)
