"""Views of the real rows of a recording's static outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...compile.ir.plan import Plan
from ..step.static_inputs import real_part


def real_results(plan: Plan, outputs: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, ...]:
    """The outputs of a recording cut to real `sizes`, in the order of the plan's symbols.

    Static memory does not move, so that a size needs its views made but once.
    """
    names = {symbol.name: size for symbol, size in zip(plan.symbols, sizes, strict=True)}
    return tuple(
        real_part(output, [_size(dim, names) for dim in result.shape])
        if isinstance(output, Tensor)
        else _size(result.name, names)
        for output, result in zip(outputs, plan.results, strict=True)
    )


def _size(dim: int | str, names: dict[str, int]) -> int:
    return dim if isinstance(dim, int) else int(eval(dim, {}, dict(names)))
