"""Which tensors a capture made and which it found: the basis of all lifetime rules.

Memory that a capture made belongs to its graph. A tensor from outside must be held as long as the
graph, which knows only its address. Storages are identified through weak references: a freed one
keeps its identity, so a new tensor is never mistaken for an old one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, UntypedStorage

from ...compile.ir.locations import user_line
from ...compile.ir.ops import tensors_in
from ...errors import (
    GeneratorInCapture,
    HostReadInCapture,
    RefusedInCapture,
    TensorLeftBreak,
)
from ...torch_compat.basics.ops import (
    OpOverload,
    branches_by_value,
    call_kernel,
    is_composite,
    is_higher_order,
    is_python_op,
    run_higher_order,
    run_kernel,
)
from ...torch_compat.basics.tensors import (
    LightDispatchMode,
    StorageWeakRef,
    alias_of,
    has_own_dispatch,
    inner_tensors,
    part_of_storage,
    storage_id,
    weak_storage,
    without_modes,
)

COMPILED_PIECE = "compiled piece"
"""The operator that a call of a piece counts as."""
TORCH_NAMESPACES = frozenset({"aten", "prim", "prims", "inductor", "mkldnn", "quantized"})
_HOST_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True, slots=True)
class Found:
    """A tensor from outside: its memory, which is held, and its form. The rest shows whether it was
    moved."""

    storage: UntypedStorage
    dtype: torch.dtype
    part: tuple[Any, Sequence[int], Sequence[int]]
    original: ReferenceType[Tensor]
    address: int
    baked: bool
    """Whether the graph has its value instead of reading its memory."""
    where: str | None
    """The user's line that read it, of a value that was baked."""

    def alias(self) -> Tensor:
        return alias_of(self.storage, self.dtype, self.part)


@dataclass(frozen=True, slots=True)
class Left:
    """Memory that a break made: which break, and the user's line that called it."""

    storage: StorageWeakRef
    name: str
    where: str | None


class Ownership:
    """Storages made inside one recording, and aliases of the tensors that came from outside.

    `constant` are the storages that no code writes to: weights, but for those that are written.
    """

    __slots__ = (
        "_found", "_made", "_returned", "before_collective", "constant", "left", "read", "reads",
    )  # fmt: skip

    def __init__(self, constant: Collection[int] = ()) -> None:
        self.constant = constant
        self.before_collective: Callable[[str], object] = lambda op: None
        """Called where a capture that runs what it records is about to wait for other ranks."""
        self.reads: Callable[[], AbstractContextManager[Any]] = nullcontext
        """Entered around the body of a custom op, in which no function mode of its caller is."""
        self.read = set[int]()
        """Addresses of memory that operators inside pieces, or kernels without one, were given."""
        self._made: dict[int, StorageWeakRef] = {}
        self._returned: dict[int, StorageWeakRef] = {}
        self.left: dict[int, Left] = {}
        """Memory that a break made when it last ran. Its next run makes other memory: only a result
        is copied to where the next graph reads it."""
        self._found: dict[int, Found] = {}

    def returned(self, result: Any) -> None:
        """A piece returned this in the warm-up run. Of it there is at the capture what others hold,
        such as a buffer that is the piece's own."""
        self._returned |= {storage_id(each): weak_storage(each) for each in memory_of(result)}

    def is_held(self, tensor: Tensor) -> bool:
        """Whether a piece returned this memory in the warm-up run."""
        return storage_id(tensor) in self._returned

    def is_constant(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self.constant

    def is_made(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._made

    def make(self, tensor: Tensor) -> None:
        """`tensor` was allocated by the capture."""
        self._made[storage_id(tensor)] = weak_storage(tensor)

    def find(
        self,
        tensors: Iterable[Tensor],
        bakes: Callable[[Tensor], bool] = lambda tensor: False,
        where: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`tensors` are used by the capture; those from outside are held.

        The memory is held, not the tensor: assigning `.data` of a parameter must not change what
        the graph reads. Nor is a tensor on it: so `is_used` tells whether others use the memory.
        """
        tensors = list(tensors)
        self.refuse_left(tensors)
        for tensor in tensors:
            identity = storage_id(tensor)
            if identity not in self._made and identity not in self._found:
                held = tensor.untyped_storage(), tensor.dtype, part_of_storage(tensor)
                baked = bakes(tensor)
                line = where() if baked else None
                found = Found(*held, ref(tensor), tensor.data_ptr(), baked, line)
                self._found[identity] = found

    def refuse_left(self, value: Any) -> None:
        """Raise TensorLeftBreak for a tensor inside `value` that a break has left."""
        for tensor in memory_of(value) if self.left else ():
            if left := self.left.get(storage_id(tensor)):
                form = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
                called = f" (at {left.where})" if left.where else ""
                raise TensorLeftBreak(where=user_line(), op=left.name, called=called, form=form)

    def found(self) -> list[Tensor]:
        """Aliases of the tensors from outside."""
        return [found.alias() for found in self._found.values()]

    def baked(self) -> Iterator[tuple[Tensor, str | None]]:
        """Aliases of the tensors whose value the graph has, each with the user's line."""
        return ((each.alias(), each.where) for each in self._found.values() if each.baked)

    def moved(self) -> Iterator[tuple[int, Tensor]]:
        """Tensors from outside that have other memory now, each with its captured address."""
        for found in self._found.values():
            now = found.original()
            if now is not None and now.data_ptr() != found.address:
                yield found.address, now


def memory_of(value: Any) -> list[Tensor]:
    """The tensors inside nested containers; for a tensor subclass those that hold its memory."""
    return [inner for tensor in tensors_in(value) for inner in inner_tensors(tensor)]


def extent(tensor: Tensor) -> tuple[int, int]:
    """Address of the first byte, and of the one after the last; of an empty one (0, 0)."""
    if not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in pairs)
    return start, start + (last + 1) * tensor.element_size()


class TensorTracker(LightDispatchMode):
    """A dispatch mode that reports to `ownership` every tensor an operator touches.

    It is active between `start` and `stop`. `device` names the dispatch key: CPU or CUDA.
    """

    def __init__(self, device: str, ownership: Ownership) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ownership = ownership
        self.computed: str | None = None
        """The first operator that must have launched work on the device."""
        self.refused: RefusedInCapture | None = None
        """Why no graph can hold this; an op may have swallowed the error."""
        self.during: Callable[[tuple[object, Any]], AbstractContextManager[Any]] = nullcontext
        """Entered around each operator and piece, with what it takes."""
        self._device = device

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # the class calls operators on what it holds
        given = kwargs or {}
        if not is_higher_order(func):
            return self.operation(func, args, given)
        self.refuse(func, args, given, memory_of((args, given)))
        with self:
            return run_higher_order(func, args, given)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled regions run compiled inside, as outside; see `recordable`."""
        return True

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        with torch.DisableTorchFunction():  # modes for functions are for the model alone
            used = memory_of((args, kwargs))
            self.refuse(func, args, kwargs, used)
            self.ownership.find(used, self.bakes, user_line)
        try:
            with self.during((func, used)):
                result = self.run(func, args, kwargs)
        except RuntimeError as error:
            if not hasattr(error, "__notes__"):  # the innermost operator
                error.add_note(f"in {func} (at {user_line()})")
            raise
        with torch.DisableTorchFunction():
            fresh = self.fresh(result, used)
        if self.computed is None and _computes(func, fresh):
            self.computed = str(func)
        return result

    def bakes(self, tensor: Tensor) -> bool:
        """Whether a graph has the value of `tensor`: it reads no memory of the host but pinned."""
        return tensor.is_cpu and not tensor.is_pinned()

    def refuse(self, func: OpOverload, args: Any, kwargs: Any, used: Sequence[Tensor]) -> None:
        """Raise GeneratorInCapture or HostReadInCapture for an operator that no graph can hold: it
        draws from a generator that torch has not registered with the graph, or needs a value of the
        device on the host."""
        on_device = self._device == "CPU" or not all(tensor.is_cpu for tensor in used)
        if has_own_generator((*args, *kwargs.values())):
            self.refused = GeneratorInCapture(where=user_line(), op=func)
            raise self.refused
        if on_device and reads_host(func, args, kwargs):
            self.refused = HostReadInCapture(where=user_line(), op=func)
            raise self.refused

    def kernel_in_piece(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """As `kernel`, of a custom op that compiled code calls."""
        return self.kernel(func, args, kwargs)

    def refuse_in_piece(self, func: OpOverload, args: Any, kwargs: Any) -> None:
        """As `refuse`, of an operator that compiled code calls."""
        used = memory_of((args, kwargs))
        self.ownership.read |= {tensor.untyped_storage().data_ptr() for tensor in used}
        self.refuse(func, args, kwargs, used)

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run `func`; operators called in the body of a custom op are seen too."""
        if func.namespace == "aten" and not is_composite(func):
            with torch.DisableTorchFunction():
                return func(*args, **kwargs)
        with self:
            return self.kernel(func, args, kwargs)

    def kernel(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run what is called outside of a capture: the CPU's kernel, if all tensors are there."""
        on_cpu = {tensor.is_cpu for tensor in memory_of((args, kwargs))} == {True}
        with self.ownership.reads():
            return run_kernel(func, "CPU" if on_cpu else self._device, args, kwargs)

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece: what its operators make is its own, unless it is a result."""
        with without_modes():
            used = memory_of(args)
            self.ownership.find(used, self.bakes)
            with self.during((COMPILED_PIECE, used)):
                result = self.seen(fn, args)
            self.fresh(result, used)
        return result

    def seen(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a piece, and refuse what it calls. What an op has swallowed is raised here, where
        the piece and so the line is known."""
        with EachOp(self.refuse_in_piece, self.kernel_in_piece, self.during):
            result = fn(*args)
        if self.refused is not None:
            raise self.refused
        return result

    def fresh(self, result: Any, used: list[Tensor]) -> list[Tensor]:
        """The tensors of `result` that share no memory with `used`: made by the capture."""
        old, is_held = {storage_id(tensor) for tensor in used}, self.ownership.is_held
        results = memory_of(result)
        fresh = [each for each in results if storage_id(each) not in old and not is_held(each)]
        for tensor in fresh:
            self.ownership.make(tensor)
        return fresh


def run_seen(
    mode: LightDispatchMode, func: OpOverload, args: Any, kwargs: Any, kernel: Callable[..., Any]
) -> Any:
    """Run `func`. Of a custom op written in Python that is `kernel(func, args, kwargs)`: `mode`
    sees the operators that it calls. A mode around `mode` sees these, and not the op itself."""
    of_torch = is_higher_order(func) or func.namespace in TORCH_NAMESPACES
    if of_torch or not is_python_op(func):
        return func(*args, **kwargs)
    with mode:
        return kernel(func, args, kwargs)


class EachOp(LightDispatchMode):
    """Calls `see` before each operator that runs inside, also in custom ops written in Python.

    `kernel` runs these. `during` is entered around each operator, with what it takes.
    """

    def __init__(
        self,
        see: Callable[[OpOverload, Any, Any], object],
        kernel: Callable[[OpOverload, Any, Any], Any],
        during: Callable[[tuple[object, Any]], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see
        self._kernel = kernel
        self._during = during

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        self._see(func, args, given)
        with self._during((func, (args, given))):
            return run_seen(self, func, args, given, self._kernel)


class MadeInBreak(LightDispatchMode):
    """Collects in `storages` the memory that operators make inside, also in custom ops."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        result = run_seen(self, func, args, given, call_kernel)
        used = {storage_id(tensor) for tensor in memory_of((args, given))}
        for tensor in memory_of(result):
            if storage_id(tensor) not in used:
                self.storages[storage_id(tensor)] = weak_storage(tensor)
        return result


def has_own_generator(arguments: Iterable[Any]) -> bool:
    """Whether one of `arguments` is a generator that graphs do not know: not torch's own."""
    return any(
        isinstance(each, torch.Generator)
        and each not in (torch.default_generator, *torch.cuda.default_generators)
        for each in arguments
    )


def reads_host(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether `func` needs a tensor's value on the host, for its result or the result's shape."""
    if is_higher_order(func):
        return branches_by_value(func, args)
    if _HOST_READS.isdisjoint(func.tags):
        return False
    if func.overloadpacket is torch.ops.aten.index:
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in(args[1]))
    return kwargs.get("output_size") is None


def _computes(func: OpOverload, fresh: list[Tensor]) -> bool:
    """Whether `func` filled the tensors that it made on a device; an allocation does not."""
    allocates = func.overloadpacket.__name__ in ALLOCATIONS
    return not allocates and any(tensor.numel() and tensor.device.type != "cpu" for tensor in fresh)


ALLOCATIONS = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
)
"""Operators that make tensors without filling them, by name."""
