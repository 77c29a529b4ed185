"""What code that is run for its own sake writes to memory is undone: by rows, if it is large."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import OtherRowsWritten

WHOLE = 16 << 20
"""Bytes up to which a tensor is copied as a whole."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def preserve_contents(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the contents of small `tensors` at the end."""
    before = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        with torch.inference_mode():  # in which tensors of either kind may be written
            for tensor, content in zip(tensors, before, strict=True):
                tensor.copy_(content)


@contextmanager
def preserve_rows(
    tensors: Sequence[Tensor], inputs: Sequence[Any], check: bool = False
) -> Iterator[None]:
    """Restore at the end what code that runs on `inputs` writes to `tensors`.

    Of a tensor above WHOLE bytes only the rows are kept that `inputs` point to: it may be a KV
    cache that fills the device. Raises OtherRowsWritten if others changed, found with `check` by
    reading all of it before and after.
    """
    large = [each for each in tensors if each.nbytes > WHOLE and each.dim() > 1]
    inputs = [each for each in inputs if all(each is not tensor for tensor in tensors)]
    kept = [_Rows(tensor, inputs, check) for tensor in large]
    with preserve_contents([each for each in tensors if each.nbytes <= WHOLE or each.dim() < 2]):
        try:
            yield
        finally:
            for rows in kept:
                rows.restore()
    for rows in kept:
        rows.check()


class _Rows:
    """Rows of a large tensor, by its largest dimension, and sums of all rows.

    Rows are those that integers in `inputs` say, as numbers of rows or of slots in blocks of rows,
    and as many of the first as an input has.
    """

    def __init__(self, tensor: Tensor, inputs: Sequence[Any], check: bool) -> None:
        self._shape = list(tensor.shape)
        self._dim = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        of_size = _SAME_SIZE.get(tensor.element_size(), tensor.dtype)
        self._bits = tensor.detach().view(of_size)
        size, rest = tensor.shape[self._dim], tensor.shape[self._dim + 1 :]
        given = [each.detach() for each in inputs if isinstance(each, Tensor)]
        most = max((each.shape[0] for each in given if each.dim()), default=0)
        numbers = [torch.arange(min(most, size), device=tensor.device)]
        for each in given:
            if not (each.is_floating_point() or each.is_complex()) and each.nbytes <= WHOLE:
                values = each.flatten().to(tensor.device, torch.int64)
                numbers += [values, values + size, values // max(1, *rest[:1])]
        rows = torch.cat(numbers).unique()  # type: ignore[no-untyped-call]
        self._rows = rows[(rows >= 0) & (rows < size)]
        self._content = self._bits.index_select(self._dim, self._rows)
        self._sums = self._summed() if check else None

    def restore(self) -> None:
        with torch.inference_mode():
            self._bits.index_copy_(self._dim, self._rows, self._content)

    def check(self) -> None:
        """Raises OtherRowsWritten."""
        if self._sums is not None:
            other = (self._summed() != self._sums).nonzero().flatten().tolist()
            if other:
                raise OtherRowsWritten(shape=self._shape, dim=self._dim, rows=other[:3])

    def _summed(self) -> Tensor:
        """A sum for each row, of a few rows at a time: on a CPU the sum of a part copies it."""
        others = [dim for dim in range(self._bits.dim()) if dim != self._dim]
        rows = max(1, WHOLE * self._bits.shape[self._dim] // self._bits.nbytes)
        parts = torch.Tensor.split(self._bits, rows, self._dim)  # type: ignore[no-untyped-call]
        return torch.cat([part.sum(others, dtype=torch.int64) for part in parts])
