"""What bisect found: the stage, the place in the model and the first wrong element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..serve.verify import TOLERANCE


@dataclass(frozen=True, slots=True)
class Wrong:
    """An element that differs; `tensor` numbers the tensors of the result."""

    tensor: int
    element: tuple[int, ...]
    expected: float
    got: float

    def __str__(self) -> str:
        error = abs(self.got - self.expected)
        place = f"output {self.tensor} {list(self.element)}"
        return f"{place} expected={self.expected:.6g} got={self.got:.6g} error={error:.3g}"


@dataclass(frozen=True, slots=True)
class Finding:
    """The first stage that is wrong, and what is known about the location.

    `size` is in real tokens, `padded` what they ran as. `step` is None if no step is wrong but a
    size that no step has, `wrong` is None where there is no result: `note` says why. `operator` and
    `graph_pass` are named only if the result is right without them.
    """

    stage: str
    step: int | None
    size: int
    padded: int
    piece: int | None = None
    operator: str | None = None
    wrong: Wrong | None = None
    note: str = ""
    graph_pass: str | None = None

    def line(self) -> str:
        """All of it on one line."""
        padding = f" (padded to {self.padded})" if self.padded != self.size else ""
        parts = [
            f"stage={self.stage}",
            f"piece={'-' if self.piece is None else self.piece}",
            *([f"pass={self.graph_pass}"] if self.graph_pass else []),
            f"operator={self.operator or '-'}",
            f"step={'-' if self.step is None else self.step}",
            f"size={self.size}{padding}",
            *([f"first wrong: {self.wrong}"] if self.wrong else []),
            *(["no result"] if self.wrong is None and self.step is not None else []),
        ]
        return " ".join(parts) + (f"; {self.note}" if self.note else "")


def first_wrong(
    expected: Sequence[Tensor], got: Sequence[Tensor], tolerance: float | None = None
) -> Wrong | None:
    """The first difference beyond the tolerance; rows of `got` beyond those expected are padding.

    Tensors of other rank or smaller shape differ in their first element, with NaN for its value;
    so does the first tensor that only one side has.
    """
    for index, (want, have) in enumerate(zip(expected, got, strict=False)):
        if want.dim() != have.dim() or any(
            h < w for w, h in zip(want.shape, have.shape, strict=True)
        ):
            return Wrong(index, (0,) * want.dim(), float("nan"), float("nan"))
        real = have[tuple(slice(0, size) for size in want.shape)]
        bad = _differs(want, real, tolerance)
        if bad.any():
            element = tuple(int(i) for i in bad.nonzero()[0])
            return Wrong(index, element, float(want[element]), float(real[element]))
    if len(expected) != len(got):
        return Wrong(min(len(expected), len(got)), (), float("nan"), float("nan"))
    return None


def _differs(want: Tensor, have: Tensor, tolerance: float | None) -> Tensor:
    if not want.dtype.is_floating_point:
        return want != have
    limit = TOLERANCE.get(want.dtype, 1e-4) if tolerance is None else tolerance
    return ~torch.isclose(have.double(), want.double(), rtol=limit, atol=limit, equal_nan=True)
