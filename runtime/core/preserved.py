"""What code that is run for its own sake writes to memory is undone: by rows, if it is large."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...errors import OtherRowsWritten
from ...torch_compat.basics.tensors import alias_of, part_of_storage, write_back

WHOLE = 16 << 20
"""Bytes up to which a tensor is copied as a whole."""

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateTooLarge(Exception):
    """The memory to save takes more bytes than allowed."""


@contextmanager
def preserve(
    tensors: Sequence[Tensor], inputs: Sequence[Any] | None = None, check: bool = False
) -> Iterator[None]:
    """Restore at the end what the block writes to `tensors`.

    See `SavedMemory`. Raises OtherRowsWritten if other rows changed, found with `check` by reading
    all of them before and after.
    """
    saved = SavedMemory(tensors, inputs, check=check)
    try:
        yield
    finally:
        saved.restore()
    saved.check()


class SavedMemory:
    """The contents of `tensors` now, or only what code that runs on `inputs` may write of them.

    With `inputs`, only those rows of a tensor above WHOLE bytes are saved that they point to: it
    may be a KV cache that fills the device. Raises StateTooLarge above `most` bytes, before it
    copies them.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        inputs: Sequence[Any] | None = None,
        *,
        check: bool = False,
        most: float = float("inf"),
    ) -> None:
        if inputs is not None:
            inputs = [each for each in inputs if all(each is not tensor for tensor in tensors)]
        self._parts = [_Part(tensor, inputs) for tensor in tensors]
        if sum(part.nbytes for part in self._parts) > most:
            raise StateTooLarge
        for part in self._parts:
            part.save(check)

    def restore(self) -> None:
        for part in self._parts:
            part.restore()

    def check(self) -> None:
        """Raises OtherRowsWritten."""
        for part in self._parts:
            part.check()

    def now(self) -> SavedMemory:
        """The same rows as they are now."""
        current = copy.copy(self)
        current._parts = [part.now() for part in self._parts]
        return current

    def values(self) -> list[Tensor]:
        """What is saved of each tensor, in its dtype."""
        return [part.content.view(part.dtype) for part in self._parts]

    def changed(self, now: SavedMemory) -> list[Tensor]:
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


class _Part:
    """What is saved of one tensor: all of it, or rows of its largest dimension, and sums of all
    rows.

    Contents are integers of the same size, so that a NaN equals itself.
    """

    content: Tensor

    def __init__(self, tensor: Tensor, inputs: Sequence[Any] | None) -> None:
        self.dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self._shape = list(tensor.shape)
        self._bits = _bits(tensor)
        self._dim = 0
        self._rows: Tensor | None = None
        self._sums: Tensor | None = None
        if inputs is not None and tensor.nbytes > WHOLE:
            self._dim = max(range(tensor.dim()), key=tensor.shape.__getitem__)
            self._rows = _rows_written(tensor, self._dim, inputs)
            self.nbytes = len(self._rows) * tensor.nbytes // tensor.shape[self._dim]

    def save(self, check: bool) -> None:
        self.content = self._read()
        if check and self._rows is not None:
            self._sums = self._summed()

    def restore(self) -> None:
        write_back(self._bits, self.content, self._dim, self._rows)

    def now(self) -> _Part:
        current = copy.copy(self)
        current.content = self._read()
        return current

    def check(self) -> None:
        """Raises OtherRowsWritten."""
        if self._sums is not None:
            other = (self._summed() != self._sums).nonzero().flatten().tolist()
            if other:
                rows = [index * self._rows_per_sum for index in other[:3]]
                raise OtherRowsWritten(shape=self._shape, dim=self._dim, rows=rows)

    def contents(self) -> tuple[int, Tensor | None, Tensor]:
        content = self.content.view(self.dtype) if self._rows is None else self.content
        return self._dim, self._rows, content

    def _read(self) -> Tensor:
        if self._rows is None:
            return self._bits.clone()
        return self._bits.index_select(self._dim, self._rows)

    def _summed(self) -> Tensor:
        """A sum for each row, of a few rows at a time: on a CPU the sum of a part copies it. Of one
        dimension a sum for each part."""
        others = [dim for dim in range(self._bits.dim()) if dim != self._dim] or None
        rows = max(1, WHOLE * self._bits.shape[self._dim] // self._bits.nbytes)
        self._rows_per_sum = 1 if others else rows
        parts = torch.Tensor.split(self._bits, rows, self._dim)  # type: ignore[no-untyped-call]
        return torch.cat([part.sum(others, dtype=torch.int64).flatten() for part in parts])


def _bits(tensor: Tensor) -> Tensor:
    """A plain tensor as integers of the same size."""
    bits = tensor.detach()
    if bits.is_conj() or bits.is_neg():  # of which torch views no other type
        bits = alias_of(bits.untyped_storage(), bits.dtype, part_of_storage(bits))
    of_size = _SAME_SIZE.get(bits.element_size(), bits.dtype)
    return bits.view(of_size) if type(bits) is Tensor else bits


def _rows_written(tensor: Tensor, dim: int, inputs: Sequence[Any]) -> Tensor:
    """Rows of dimension `dim` that code on `inputs` may write.

    Rows are those that integers in `inputs` say, as numbers of rows or of slots in blocks of rows,
    and as many of the first as an input has: up to WHOLE bytes of them if any input is integers.
    """
    size, rest = tensor.shape[dim], tensor.shape[dim + 1 :]
    arguments = [each.detach() for each in inputs if isinstance(each, Tensor)]
    indices = [each for each in arguments if not (each.is_floating_point() or each.is_complex())]
    first = max((each.shape[0] for each in arguments if each.dim()), default=0)
    if indices:
        first = min(first, WHOLE * size // tensor.nbytes)
    numbers = [torch.arange(min(first, size), device=tensor.device)]
    for each in indices:
        if each.nbytes <= WHOLE:
            values = each.flatten().to(tensor.device, torch.int64)
            numbers += [values, values + size, values // max([1, *rest[:1]])]
    rows: Tensor = torch.cat(numbers).unique()  # type: ignore[no-untyped-call]
    return rows[(rows >= 0) & (rows < size)]


def _rows_of(content: Tensor, elements: Tensor) -> Tensor:
    """By the largest dimension; (rows, elements of a row), or the elements of a vector."""
    kept = content.masked_fill(~elements, 0)
    if kept.dim() < 2:
        return kept[elements]
    dim = max(range(kept.dim()), key=kept.shape.__getitem__)
    rows, chosen = (each.movedim(dim, 0).flatten(1) for each in (kept, elements))
    return rows[chosen.any(1)]
