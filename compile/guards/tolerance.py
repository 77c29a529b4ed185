"""By how much two runs of a model may differ, derived from the model itself.

A compiler leaves roundings out and adds others; kernels of another size add up in another order.
What that can change is measured: the uncompiled model runs again with the result of each operator
changed at random by at most half of its precision. How that reaches the results is how rounding
reaches them, for this model and these inputs: a cancellation or a close decision of a router counts
with what it amplifies. Differences are by row of a result, relative to the largest element of the
row, in units of the precision of its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...torch_compat.basics.tensors import LightDispatchMode, is_fake, storage_id, tree_leaves
from ..ir.ops import tensors_in, written_by

FLOOR = 8.0
"""Differences that are never wrong, in units of the dtype's precision."""

LEVEL = 2 * FLOOR
"""The difference of integers of 8 bits that are one apart: only rounding excuses it."""

FACTOR = 8.0
"""How much more than the largest measured effect of rounding a difference may be."""

RUNS = (range(2), range(2, 8), range(8, 40))
"""Seeds of the runs that measure it, more of them while a difference would be called wrong.

A router takes two equal scores the other way round in about one run of five."""

MOVED = 10
"""One row in so many may have a tolerance as large as it is."""

Run = Callable[[], Any]
"""The uncompiled model on one step: its results, nested in any way."""

_NONE = torch.zeros(0, dtype=torch.float64, device="cpu")

_REDUCED = 2.0**-10
"""Precision of float32 products where torch may compute them in TF32 or bfloat16."""


def precision(dtype: torch.dtype) -> float:
    """The relative distance of two neighboring numbers, as the device computes."""
    reduced = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    return _REDUCED if reduced else torch.finfo(dtype).eps


def differences(expected: Any, got: Any) -> Tensor:
    """The largest difference in each row of all results, float64 on the CPU.

    Infinite for what is not comparable: another shape or dtype, other integers or values, a NaN or
    an infinity that only one has. A vector is one row. Integers of 8 bits may be quantized: one
    apart is LEVEL.
    """
    return torch.cat([_NONE, *_differences(expected, got)])


def relative_differences(one: Tensor, other: Tensor) -> tuple[Tensor, float]:
    """As `differences`, relative to the largest element of a row, or to the 256 values of integers
    of 8 bits; and the precision of the dtype, which is zero for integers."""
    if one.dtype in _QUANTIZED:
        return differences(one, other) / LEVEL / 256, 0.0
    if not (one.dtype.is_floating_point or one.dtype.is_complex):
        return differences(one, other), 0.0
    eps = precision(one.dtype)
    return differences(one, other) * eps, eps


def _differences(expected: Any, got: Any) -> list[Tensor]:
    """By result."""
    wanted, given = tree_leaves(expected), tree_leaves(got)
    if len(wanted) != len(given):
        return [torch.full((1,), torch.inf, dtype=torch.float64, device="cpu")]
    return [_row_differences(*pair) for pair in zip(wanted, given, strict=True)]


def _row_differences(want: Any, have: Any) -> Tensor:
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        same = want is have or want == have
        return torch.tensor([0.0 if same else torch.inf], dtype=torch.float64, device="cpu")
    if (want.shape, want.dtype) != (have.shape, have.dtype):
        return torch.tensor([torch.inf], dtype=torch.float64, device="cpu")
    if not want.numel():
        return _NONE
    rows = len(want) if want.dim() > 1 else 1
    if want.dtype.is_complex:
        want, have = torch.view_as_real(want), torch.view_as_real(have)
    if not want.dtype.is_floating_point and want.dtype not in _QUANTIZED:
        wrong = (want != have).reshape(rows, -1).any(1)
        return torch.where(wrong, torch.inf, 0.0).double().cpu()
    one: Tensor = want.double()
    other: Tensor = have.double()
    same = (one == other) | (one.isnan() & other.isnan())
    apart: Tensor = (one - other).abs().nan_to_num(torch.inf).masked_fill_(same, 0.0)
    apart = apart.reshape(rows, -1).amax(1)
    if want.dtype in _QUANTIZED:
        return apart.cpu() * LEVEL
    size = one.abs().nan_to_num(0.0, 0.0, 0.0).reshape(rows, -1).amax(1)
    smallest = torch.finfo(want.dtype).tiny
    return (apart / size.clamp(min=smallest) / precision(want.dtype)).cpu()


class Rounded(LightDispatchMode):
    """Changes what operators called inside compute as another rounding would, by `seed`."""

    sees_inside = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        self._made: set[int] = set()
        """Memory that operators called inside allocated: no weight and no state is changed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        written = list(written_by(func, args, given))
        was_whole = all(map(_is_whole, written))
        result = func(*args, **given)
        read = set(map(storage_id, tensors_in((args, given))))
        fresh = [each for each in tensors_in(result) if storage_id(each) not in read]
        self._made |= set(map(storage_id, fresh))
        computed = [*fresh, *(each for each in written if storage_id(each) in self._made)]
        for tensor in computed:
            if tensor.dtype in _ROUNDED and tensor.numel():
                exact = was_whole and _is_whole(tensor)
                if not (exact and all(map(_is_whole, tree_leaves((args, given))))):
                    self._round(tensor)
        return result

    def _round(self, tensor: Tensor) -> None:
        generator = self._generators.get(tensor.device)
        if generator is None:
            generator = torch.Generator(tensor.device).manual_seed(self._seed)
            self._generators[tensor.device] = generator
        part = torch.rand(tensor.shape, generator=generator, device=tensor.device)
        change = 1 + (part.double() - 0.5) * precision(tensor.dtype)
        tensor.copy_(tensor.double() * change)


def _is_whole(value: Any) -> bool:
    """Whether these are whole numbers that a float holds as they are. Computed of such alone, as
    counts are, they are the same with another rounding; with one less, rows lie elsewhere."""
    if not isinstance(value, Tensor):
        return not isinstance(value, float) or value.is_integer()
    if not (value.is_floating_point() or value.is_complex()):
        return True
    if value.dtype not in _ROUNDED or value.layout is not torch.strided:
        return False
    if value.is_meta or is_fake(value):
        return False
    if not (value == value.trunc()).all():
        return False
    return bool((value.abs() <= 1 / torch.finfo(value.dtype).eps).all())


_QUANTIZED = (torch.int8, torch.uint8)
_ROUNDED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def rounding(run: Run, expected: Any, seeds: Sequence[int]) -> list[Tensor]:
    """What rounding alone changes: by result, and by row as in `differences`."""
    largest: list[Tensor] | None = None
    for seed in seeds:
        with Rounded(seed):
            result = run()
        changes = _differences(expected, result)
        largest = changes if largest is None else _largest(changes, largest)
    return largest or []


def _largest(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """By row of `some`. Of what has another structure, shape or dtype in the other each row is
    infinite if that is, and has no part in it if only `some` are of another form."""
    if len(some) != len(others):
        others = [others[0][:1] if len(others) == 1 else _NONE] * len(some)
    pairs = zip(some, others, strict=True)
    return [torch.maximum(one, _fitted(other, len(one))) for one, other in pairs]


def _fitted(rows: Tensor, count: int) -> Tensor:
    if len(rows) == count:
        return rows
    unlike = len(rows) == 1 and bool(rows.isinf().all())
    return torch.full((count,), torch.inf if unlike else 0.0, dtype=torch.float64, device="cpu")


@dataclass(frozen=True, slots=True)
class Excess:
    """The first row of results that differs by more than its tolerance, or of which nothing is
    known: with a tolerance as large as the row, zeros would be taken for it."""

    result: int
    row: int
    difference: float
    tolerance: float
    unknown: str = ""
    """Why nothing is known."""


def excess(expected: Any, got: Any, run: Run) -> Excess | None:
    """Where a difference is beyond the tolerance; None if it is not, or nothing is known."""
    found = compare(expected, got, run)
    return None if found is None or found.unknown else found


def compare(expected: Any, got: Any, run: Run) -> Excess | None:
    """Where a difference is beyond the tolerance, which `run` measures; None if `got` is proved.

    `run` is only called for a difference above FLOOR. What it writes must be restored by itself.
    """
    by_result = _differences(expected, got)
    apart = torch.cat([_NONE, *by_result])
    limit = torch.full_like(apart, FLOOR)
    for seeds in RUNS:
        if bool((apart <= limit).all()):
            break
        noise = _largest(
            [torch.zeros_like(each) for each in by_result], rounding(run, expected, seeds)
        )
        limit = torch.maximum(limit, FACTOR * torch.cat([_NONE, *noise]))
    if bool((beyond := apart > limit).any()):
        first = int(beyond.nonzero()[0])
        return Excess(*_place(by_result, first), float(apart[first]), float(limit[first]))
    return _unbounded(expected, by_result, limit)


def _unbounded(expected: Any, by_result: list[Tensor], limit: Tensor) -> Excess | None:
    """A row whose tolerance is infinite, or one of those with a tolerance as large as they are, if
    these are more than one in MOVED: so many may have another expert, chosen by rounding."""
    apart = torch.cat([_NONE, *by_result])
    units = [
        _units(want, len(rows))
        for want, rows in zip(tree_leaves(expected), by_result, strict=False)
    ]
    is_open = (apart > FLOOR) & (limit >= torch.cat([_NONE, *units]))
    infinite = is_open & limit.isinf()
    if not infinite.any() and int(is_open.sum()) * MOVED <= len(is_open):
        return None
    first = int((infinite if infinite.any() else is_open).nonzero()[0])
    result, row = _place(by_result, first)
    why = f"rounding alone changes all of row {row} of result {result}"
    return Excess(result, row, float(apart[first]), float(limit[first]), why)


def _units(want: Any, count: int) -> Tensor:
    """How many units of its dtype's precision a row is."""
    counted = isinstance(want, Tensor) and (want.is_floating_point() or want.is_complex())
    size = 1 / precision(want.dtype) if counted else torch.inf
    return torch.full((count,), size, dtype=torch.float64, device="cpu")


def _place(by_result: list[Tensor], row: int) -> tuple[int, int]:
    result = 0
    while row >= len(by_result[result]):
        row, result = row - len(by_result[result]), result + 1
    return result, row
