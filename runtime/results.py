"""Static outputs of a recording, and views of their real rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..compile.plan import Plan

_KEPT = 4096


class RealResults:
    """The results of one recording, cut to the real size of each symbol.

    A view is made once per size: static memory does not move.
    """

    __slots__ = ("_cut", "_outputs", "_plan")

    def __init__(self, plan: Plan, outputs: Sequence[Any]) -> None:
        self._plan = plan
        self._outputs = outputs
        self._cut: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def at(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        """The results for real `sizes`, in the order of the plan's symbols."""
        cut = self._cut.get(sizes)
        if cut is None:
            if len(self._cut) >= _KEPT:
                self._cut.clear()
            cut = self._cut[sizes] = self._cut_to(sizes)
        return cut

    def _cut_to(self, sizes: tuple[int, ...]) -> tuple[Any, ...]:
        names = {s.name: n for s, n in zip(self._plan.symbols, sizes, strict=True)}
        return tuple(
            _rows(output, [_size(dim, names) for dim in result.shape])
            if isinstance(output, Tensor)
            else _size(result.name, names)
            for output, result in zip(self._outputs, self._plan.results, strict=True)
        )


def _rows(output: Tensor, shape: list[int]) -> Tensor:
    return output[tuple(slice(0, size) for size in shape)]


def _size(dim: int | str, names: dict[str, int]) -> int:
    return dim if isinstance(dim, int) else int(eval(dim, {}, dict(names)))
