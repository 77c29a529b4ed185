"""What code that is run for its own sake writes to memory is undone: by rows, if it is large."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import OtherRowsWritten

WHOLE = 16 << 20
"""Bytes up to which a tensor is copied as a whole."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateTooLarge(Exception):
    """The rows to keep take more bytes than allowed."""


@contextmanager
def preserve_contents(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Restore the contents of small `tensors` at the end."""
    kept = [_Whole(tensor) for tensor in tensors]
    try:
        yield
    finally:
        for each in kept:
            each.restore()


@contextmanager
def preserve_rows(
    tensors: Sequence[Tensor], inputs: Sequence[Any], check: bool = False
) -> Iterator[None]:
    """Restore at the end what code that runs on `inputs` writes to `tensors`.

    See `Kept`. Raises OtherRowsWritten if other rows changed, found with `check` by reading all of
    them before and after.
    """
    kept = Kept(tensors, inputs, check=check)
    try:
        yield
    finally:
        kept.restore()
    kept.check()


class Kept:
    """What code that runs on `inputs` may write to `tensors`, as it is now.

    Of a tensor above WHOLE bytes only the rows are kept that `inputs` point to: it may be a KV
    cache that fills the device. Raises StateTooLarge above `most` bytes, before it copies them.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[Any],
        *,
        check: bool = False,
        most: float = float("inf"),
    ) -> None:
        inputs = [each for each in inputs if all(each is not tensor for tensor in tensors)]
        self._parts: list[_Rows | _Whole] = []
        for tensor in tensors:
            small = tensor.nbytes <= WHOLE
            part = _Whole(tensor, most) if small else _Rows(tensor, inputs, check, most)
            most -= part.nbytes
            self._parts.append(part)

    def restore(self) -> None:
        for part in self._parts:
            part.restore()

    def check(self) -> None:
        """Raises OtherRowsWritten."""
        for part in self._parts:
            part.check()

    def now(self) -> Kept:
        """The same rows as they are now."""
        current = copy.copy(self)
        current._parts = [copy.copy(part) for part in self._parts]
        for part in current._parts:
            part.content = part.read()
        return current

    def changed(self, now: Kept) -> list[Tensor]:
        """Elements of each tensor that differ between this and `now`, which is of the same rows."""
        pairs = zip(self._parts, now._parts, strict=True)
        return [before.content != after.content for before, after in pairs]

    def rows_of(self, elements: Sequence[Tensor]) -> list[Tensor]:
        """The rows of each tensor that have some of its `elements`; all others of them are 0."""
        pairs = zip(self._parts, elements, strict=True)
        return [_rows_of(part.content, chosen).view(part.dtype) for part, chosen in pairs]

    def contents(self) -> list[tuple[int, Tensor | None, Tensor]]:
        """For each tensor the dimension, the rows in it (None for all of them), and contents."""
        return [part.contents() for part in self._parts]


class _Whole:
    """The contents of a small tensor."""

    def __init__(self, tensor: Tensor, most: float = float("inf")) -> None:
        self.nbytes = tensor.nbytes
        if self.nbytes > most:
            raise StateTooLarge
        self.dtype = tensor.dtype
        self._bits = _bits(tensor)
        self.content = self.read()

    def restore(self) -> None:
        with torch.inference_mode():  # in which tensors of either kind may be written
            self._bits.copy_(self.content)

    def read(self) -> Tensor:
        return self._bits.clone()

    def check(self) -> None:
        """Nothing of it is left out."""

    def contents(self) -> tuple[int, Tensor | None, Tensor]:
        return 0, None, self.content.view(self.dtype)


def _rows_of(content: Tensor, elements: Tensor) -> Tensor:
    """By the largest dimension; (rows, elements of a row), or the elements of a vector."""
    kept = content.masked_fill(~elements, 0)
    if kept.dim() < 2:
        return kept[elements]
    dim = max(range(kept.dim()), key=kept.shape.__getitem__)
    rows, chosen = (each.movedim(dim, 0).flatten(1) for each in (kept, elements))
    return rows[chosen.any(1)]


def _bits(tensor: Tensor) -> Tensor:
    """A plain tensor as integers of the same size, so that a NaN equals itself."""
    bits = tensor.detach()
    of_size = _SAME_SIZE.get(bits.element_size(), bits.dtype)
    return bits.view(of_size) if type(bits) is Tensor else bits


class _Rows:
    """Rows of a large tensor, by its largest dimension, and sums of all rows.

    Rows are those that integers in `inputs` say, as numbers of rows or of slots in blocks of rows,
    and as many of the first as an input has: up to WHOLE bytes of them if any input is integers.
    """

    def __init__(self, tensor: Tensor, inputs: Sequence[Any], check: bool, most: float) -> None:
        self._shape = list(tensor.shape)
        self._dim = max(range(tensor.dim()), key=tensor.shape.__getitem__)
        self.dtype = tensor.dtype
        self._bits = _bits(tensor)
        size, rest = tensor.shape[self._dim], tensor.shape[self._dim + 1 :]
        given = [each.detach() for each in inputs if isinstance(each, Tensor)]
        indices = [each for each in given if not (each.is_floating_point() or each.is_complex())]
        first = max((each.shape[0] for each in given if each.dim()), default=0)
        if indices:
            first = min(first, WHOLE * size // tensor.nbytes)
        numbers = [torch.arange(min(first, size), device=tensor.device)]
        for each in indices:
            if each.nbytes <= WHOLE:
                values = each.flatten().to(tensor.device, torch.int64)
                numbers += [values, values + size, values // max([1, *rest[:1]])]
        rows = torch.cat(numbers).unique()  # type: ignore[no-untyped-call]
        self._rows = rows[(rows >= 0) & (rows < size)]
        self.nbytes = len(self._rows) * tensor.nbytes // size
        if self.nbytes > most:
            raise StateTooLarge
        self.content = self.read()
        self._sums = self._summed() if check else None

    def restore(self) -> None:
        with torch.inference_mode():
            self._bits.index_copy_(self._dim, self._rows, self.content)

    def read(self) -> Tensor:
        return self._bits.index_select(self._dim, self._rows)

    def check(self) -> None:
        """Raises OtherRowsWritten."""
        if self._sums is not None:
            other = (self._summed() != self._sums).nonzero().flatten().tolist()
            if other:
                rows = [index * self._rows_per_sum for index in other[:3]]
                raise OtherRowsWritten(shape=self._shape, dim=self._dim, rows=rows)

    def contents(self) -> tuple[int, Tensor | None, Tensor]:
        return self._dim, self._rows, self.content

    def _summed(self) -> Tensor:
        """A sum for each row, of a few rows at a time: on a CPU the sum of a part copies it. Of one
        dimension a sum for each part."""
        others = [dim for dim in range(self._bits.dim()) if dim != self._dim] or None
        rows = max(1, WHOLE * self._bits.shape[self._dim] // self._bits.nbytes)
        self._rows_per_sum = 1 if others else rows
        parts = torch.Tensor.split(self._bits, rows, self._dim)  # type: ignore[no-untyped-call]
        return torch.cat([part.sum(others, dtype=torch.int64).flatten() for part in parts])
