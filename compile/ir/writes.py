"""Which tensors operators write to, by their schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from ...torch_compat.ops import mutated_arguments
from ...torch_compat.tensors import TorchDispatchMode, storage_id, tree_leaves


class Writes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which tensors the operators called inside write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: set[int] = set()

    def include(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self._storages |= {storage_id(tensor) for tensor in written_by(func, args, given)}
        return func(*args, **given)


def written_by(op: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that the schema of `op` says it writes to."""
    for given in mutated_arguments(op, args, kwargs):
        yield from tensors_in(given)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside nested tuples, lists and dicts, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
