"""Which tensors a capture made and which it found: the ground of every lifetime rule.

Memory that a capture made belongs to its graph. A tensor from outside must be held as long as the
graph lives, for the graph knows only its address. Storages are told apart by weak references: a
freed one keeps its identity, so a new tensor is never mistaken for an old one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from weakref import ReferenceType, ref

from torch import Tensor

from ...torch_compat.tensors import StorageWeakRef, storage_id, weak_storage


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor from outside: `alias` holds its memory, the rest tells whether it moved."""

    alias: Tensor
    original: ReferenceType[Tensor]
    address: int


class Ownership:
    """Storages made inside one capture, and aliases of the tensors that came from outside."""

    __slots__ = ("_found", "_made")

    def __init__(self) -> None:
        self._made: dict[int, StorageWeakRef] = {}
        self._found: dict[int, Found] = {}

    def is_made(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._made

    def make(self, tensor: Tensor) -> None:
        """`tensor` was allocated by the capture."""
        self._made[storage_id(tensor)] = weak_storage(tensor)

    def find(self, tensors: Iterable[Tensor]) -> None:
        """`tensors` are used; those from outside are held.

        An alias is held, not the tensor: giving a parameter new data must not change what the
        graph reads.
        """
        for tensor in tensors:
            identity = storage_id(tensor)
            if identity not in self._made and identity not in self._found:
                self._found[identity] = Found(tensor.detach(), ref(tensor), tensor.data_ptr())

    def moved(self) -> Iterator[tuple[int, Tensor]]:
        """Tensors from outside that got other memory since, each with its captured address."""
        for found in self._found.values():
            now = found.original()
            if now is not None and now.data_ptr() != found.address:
                yield found.address, now
