"""Which tensors a capture made and which it found: the basis of all lifetime rules.

Memory that a capture made belongs to its graph. A tensor from outside must be held as long as the
graph, which knows only its address. Storages are identified through weak references: a freed one
keeps its identity, so a new tensor is never mistaken for an old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

from torch import Tensor

from ...compile.ir.ops import tensors_in
from ...torch_compat.basics.ops import OpOverload, is_composite, run_kernel
from ...torch_compat.basics.tensors import (
    LightDispatchMode,
    StorageWeakRef,
    inner_tensors,
    storage_id,
    weak_storage,
    without_modes,
)


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor from outside. `alias` holds its memory; the rest shows whether it was moved."""

    alias: Tensor
    original: ReferenceType[Tensor]
    address: int


class Ownership:
    """Storages made inside one recording, and aliases of the tensors that came from outside."""

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
        """`tensors` are used by the capture; those from outside are held.

        An alias is held, not the tensor: assigning `.data` of a parameter must not change what the
        graph reads.
        """
        for tensor in tensors:
            identity = storage_id(tensor)
            if identity not in self._made and identity not in self._found:
                self._found[identity] = Found(tensor.detach(), ref(tensor), tensor.data_ptr())

    def found(self) -> list[Tensor]:
        """Aliases of the tensors from outside."""
        return [found.alias for found in self._found.values()]

    def moved(self) -> Iterator[tuple[int, Tensor]]:
        """Tensors from outside that have other memory now, each with its captured address."""
        for found in self._found.values():
            now = found.original()
            if now is not None and now.data_ptr() != found.address:
                yield found.address, now


def memory_of(value: Any) -> list[Tensor]:
    """The tensors inside nested containers; for a tensor subclass those that hold its memory."""
    return [inner for tensor in tensors_in(value) for inner in inner_tensors(tensor)]


class TensorTracker(LightDispatchMode):
    """A dispatch mode that reports to `ownership` every tensor an operator touches.

    It is active between `start` and `stop`. `device` names the dispatch key: CPU or CUDA.
    """

    def __init__(self, device: str, ownership: Ownership) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ownership = ownership
        self.computed: str | None = None
        """The first operator that must have launched work on the device."""
        self._device = device

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.operation(func, args, kwargs or {})

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        used = memory_of((args, kwargs))
        self.ownership.find(used)
        result = self.run(func, args, kwargs)
        fresh = self.fresh(result, used)
        if self.computed is None and _computes(func, fresh):
            self.computed = str(func)
        return result

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run `func`; operators called in the body of a custom op are seen too."""
        if func.namespace == "aten" and not is_composite(func):
            return func(*args, **kwargs)
        # the kernel that is called outside of a capture: the CPU's, if all tensors are there
        on_cpu = {tensor.is_cpu for tensor in memory_of((args, kwargs))} == {True}
        with self:
            return run_kernel(func, "CPU" if on_cpu else self._device, args, kwargs)

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece, whose inside no dispatch mode can see."""
        with without_modes():
            used = memory_of(args)
            self.ownership.find(used)
            result = fn(*args)
            self.fresh(result, used)
        return result

    def fresh(self, result: Any, used: list[Tensor]) -> list[Tensor]:
        """The tensors of `result` that share no memory with `used`: made by the capture."""
        old = {storage_id(tensor) for tensor in used}
        fresh = [tensor for tensor in memory_of(result) if storage_id(tensor) not in old]
        for tensor in fresh:
            self.ownership.make(tensor)
        return fresh


def _computes(func: OpOverload, fresh: list[Tensor]) -> bool:
    """Whether `func` filled the tensors that it made on a device; an allocation does not."""
    allocates = func.overloadpacket.__name__ in ALLOCATIONS
    return not allocates and any(tensor.numel() and tensor.device.type != "cpu" for tensor in fresh)


ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Operators that make tensors without filling them, by name."""
