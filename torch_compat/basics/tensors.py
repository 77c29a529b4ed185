"""Tensors: fake modes, storage identity, dispatch modes, trees."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._C._dynamo.guards import (
    TensorGuards,
    set_is_in_mode_without_ignore_compile_internals,
)
from torch._library.fake_class_registry import FakeScriptObject
from torch._library.opaque_object import get_opaque_obj_repr, is_opaque_value_type
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import (
    GetAttrKey,
    MappingKey,
    SequenceKey,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)
from torch.utils._pytree import tree_map_only as map_any_tree
from torch.utils.dlpack import from_dlpack

from .devices import autocast_devices
from .ops import is_higher_order, run_higher_order
from .patch import own_export_modes

__all__ = [
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "StorageWeakRef",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]


# torch's context managers around these cost a microsecond, too much for a step
is_grad_enabled = torch.is_grad_enabled


copy_all: Callable[[list[Tensor], list[Tensor]], None] = torch._foreach_copy_
zero_all: Callable[[list[Tensor]], None] = torch._foreach_zero_
"""One call for several tensors, and on a device one launch: if all are dense and of one dtype, and
a copy between equal strides. Else one copy or launch for each."""
set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def under_autocast(fn: Callable[..., Any], arguments: Sequence[Any]) -> Callable[..., Any]:
    """`fn`, called under `torch.autocast(*arguments)`."""
    device, dtype, enabled, cache_enabled = arguments

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device, dtype, enabled, cache_enabled):
            return fn(*args, **kwargs)

    return call


def under_this_autocast(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, also later called under the autocast that is active now."""
    cache = torch.is_autocast_cache_enabled()
    for device in filter(torch.is_autocast_enabled, autocast_devices()):
        fn = under_autocast(fn, (device, torch.get_autocast_dtype(device), True, cache))
    return fn


def tree_map_only(kinds: Any, fn: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `fn` of each leaf that is one of `kinds`: as torch's own, in less time."""
    if isinstance(value, kinds):
        return fn(value)
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([tree_map_only(kinds, fn, each) for each in value])
    if kind is dict:
        return {key: tree_map_only(kinds, fn, each) for key, each in value.items()}
    return value if value is None or kind in LEAVES else map_any_tree(kinds, fn, value)


LEAVES = frozenset({int, float, bool, str, torch.dtype, torch.device})
"""Classes of which no value has anything inside."""

_VALUE_READS = frozenset(
    {
        *(Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__repr__),
        *(Tensor.apply_, Tensor.map_, Tensor.map2_),
        *(Tensor.__float__, Tensor.__index__),  # `torch.Tensor([t])`
        # of what serializes a tensor, it alone asks for these
        Tensor._backward_hooks.__get__,  # type: ignore[union-attr]
    }
)
_OF_NUMBERS: frozenset[Any] = frozenset(
    {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}
)
"""Make a tensor of numbers, also of those in a list of tensors."""


def reads_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function reads values, for which a device waits: of those reads that a mode for
    functions alone sees. `torch.from_dlpack` reads none."""
    if func is Tensor.__dlpack__:
        frame: Any = sys._getframe()
        while frame is not None and frame.f_code is not from_dlpack.__code__:
            frame = frame.f_back
        return frame is None
    if func in _OF_NUMBERS:
        lists = [each for each in (*args, *kwargs.values()) if not isinstance(each, Tensor)]
        return any(isinstance(each, Tensor) for each in tree_leaves(lists))
    return func in _VALUE_READS


def reads_memory(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a function reads memory on the host, which no dispatch mode sees."""
    copies = func in (Tensor.__deepcopy__, Tensor.__dlpack__)
    return copies or reads_values(func, args, kwargs)


def leaves_with_paths(value: Any) -> list[tuple[tuple[str | int, ...], Any]]:
    """The leaves of nested containers, each with its keys, positions and attribute names."""
    flat, _ = tree_flatten_with_path(value)
    return [(tuple(map(_step, path)), leaf) for path, leaf in flat]


def containers_with_paths(
    value: Any, path: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """What `leaves_with_paths` takes apart, outer ones first, each with its path."""
    children, _ = tree_flatten_with_path(value, is_leaf=lambda each: each is not value)
    if children == [((), value)]:
        return
    yield path, value
    for entries, child in children:
        yield from containers_with_paths(child, (*path, *map(_step, entries)))


def _step(entry: Any) -> str | int:
    match entry:
        case MappingKey(key) if isinstance(key, (str, int)):
            return key
        case SequenceKey(index):
            return int(index)
        case GetAttrKey(name):
            return str(name)
    return str(entry)


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has a shape but no memory."""
    return isinstance(tensor, FakeTensor)


def form_test(
    tensors: Sequence[Tensor], any_rows: bool = False, any_strides: bool = True
) -> Callable[..., bool]:
    """A function of as many tensors: whether each has the class, dtype, device and sizes of these,
    and is negated or conjugated as these are. With `any_rows` the first size may differ, and
    strides may not.

    One call of torch's C++ instead of ten attribute reads. It may be False for equal forms, for
    example in inference mode or where gradients are required.
    """
    sizes: Any = [list(tensor.shape) for tensor in tensors]
    strides: Any = [[None] * tensor.dim() for tensor in tensors]
    if any_rows:
        sizes = [[None, *size[1:]] if size else [] for size in sizes]
    if any_rows or not any_strides:
        strides = [list(tensor.stride()) for tensor in tensors]
    guards: Any = TensorGuards
    test: Callable[..., bool] = guards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return test


def inference_and_grad() -> tuple[bool, bool]:
    """The modes of torch on which `form_test` depends."""
    return torch.is_inference_mode_enabled(), torch.is_grad_enabled()


def is_transformed(value: Any) -> bool:
    """Whether `value` is a tensor inside a function transform, such as `torch.vmap`."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return isinstance(value, Tensor) and bool(wrapped(value))


def has_plain_memory(value: Any) -> bool:
    """Whether `value` is a tensor of rows in memory: neither nested, sparse nor a stand-in."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout is not torch.strided:
        return False
    return not is_fake(value) and not is_transformed(value)


def has_own_operators(tensor: Tensor) -> bool:
    """Whether the class of `tensor` computes in its own way, and so would a copy. That of a result
    of a collective that has not ended does not: a copy is a plain tensor."""
    return _computes(type(tensor)) and _computes(type(tensor.clone()))


def _computes(kind: type[Tensor]) -> bool:
    function, plain = (getattr(c.__torch_function__, "__func__", None) for c in (kind, Tensor))
    own = function is not plain and kind.__torch_function__ is not Parameter.__torch_function__
    return own or has_own_dispatch(kind)


def has_own_dispatch(kind: type) -> bool:
    """Whether operators on tensors of this class call others, on what the tensors hold."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__  # type: ignore[attr-defined]


def writes_counted(tensor: Tensor) -> int:
    """How many in-place writes torch has counted on the memory of `tensor`."""
    return tensor._version


def fresh_fake_mode() -> Any:
    """A fake mode with its own shape environment."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def is_faking() -> bool:
    """Whether operations make fake tensors in this thread: a run that computes only shapes."""
    return any(isinstance(mode, FakeTensorMode) for mode in _dispatch_modes())


class OwnFunctionMode(TorchFunctionMode):
    """A function mode of the library, which stays entered between calls of the engine."""


@contextmanager
def without_modes() -> Iterator[None]:
    """Run without the dispatch modes of this thread and our function mode; those of others stay."""
    with own_export_modes(), _disable_current_modes(), ExitStack() as stack:
        mode = last_modes()[1]
        if isinstance(mode, OwnFunctionMode):
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            stack.callback(mode.__enter__)
        yield


def last_modes() -> tuple[Any, Any]:
    """The dispatch mode and the function mode that this thread entered last; None for none."""
    modes = [_dispatch_modes(), _function_modes()]
    dispatch, function = (entered[-1] if entered else None for entered in modes)
    return dispatch, function


def active_modes() -> list[Any]:
    """The modes that see each torch function or op called now, the default device's apart."""
    return [m for m in _function_modes() if not isinstance(m, DeviceContext)] + _dispatch_modes()


def modes_of_others() -> list[Any]:
    """Those of `active_modes` that are not the library's."""
    own = __name__.partition(".")[0]
    return [mode for mode in active_modes() if type(mode).__module__.partition(".")[0] != own]


def _dispatch_modes() -> list[Any]:
    """The dispatch modes that this thread is in, the one entered last at the end."""
    return _get_current_dispatch_mode_stack() if num_dispatch_modes() else []


def _function_modes() -> list[Any]:
    """The function modes that this thread is in, the one entered last at the end."""
    return _get_current_function_mode_stack()  # type: ignore[no-any-return, no-untyped-call]


def has_default_device() -> bool:
    """Whether tensors that are made without a device are made on one that a program set."""
    return any(isinstance(mode, DeviceContext) for mode in _function_modes())


def storage_id(tensor: Tensor) -> int:
    """Identity of the storage of `tensor`; unique while a strong or weak reference exists."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of the elements in order, as uint8[n]; on the memory of `tensor` if it is dense."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the storage of `tensor`; its identity is not reused while it exists."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def is_used(storage: StorageWeakRef) -> bool:
    """Whether a tensor uses the memory. An object of its storage that someone holds does not count:
    all of them are one object, which has one reference to the memory."""
    count: int = 0 if storage.expired() else torch._C._storage_Use_Count(storage.cdata)  # type: ignore[no-untyped-call]
    return count > 1


def unowned_alias(tensor: Tensor) -> Tensor:
    """A tensor on the same memory that does not keep the memory alive."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    return alias_of(memory, tensor.dtype, part_of_storage(tensor))


def detached(tensor: Tensor) -> Tensor:
    """`tensor` at its present address, not a weight. A view stays one: torch's code for inputs that
    share memory asks what they are views of."""
    base = tensor._base
    if base is None or _read_as(base) != _read_as(tensor):
        return tensor.detach()
    return base.detach().as_strided(*part_of_storage(tensor)[1:], tensor.storage_offset())


def _read_as(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


def part_of_storage(tensor: Tensor) -> tuple[Any, Sequence[int], Sequence[int]]:
    """Offset, size and strides of `tensor` in its storage."""
    return tensor.storage_offset(), tensor.size(), tensor.stride()


def alias_of(storage: Any, dtype: torch.dtype, part: tuple[Any, ...]) -> Tensor:
    """A part of a storage as a tensor that may be written in any mode."""
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *part)


def is_wrapper_subclass(tensor: Tensor) -> bool:
    """Whether `tensor` wraps other tensors and has no memory itself."""
    return bool(is_traceable_wrapper_subclass(tensor))


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of `tensor`: itself, or those it wraps."""
    if is_transformed(tensor):
        return inner_tensors(torch._C._functorch.get_unwrapped(tensor))
    if type(tensor) is Tensor or not is_wrapper_subclass(tensor):
        return [tensor]
    names: Any = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    return [inner for name in names for inner in inner_tensors(getattr(tensor, name))]


def subclass_parts(tensor: Tensor) -> tuple[dict[str, Tensor], Any]:
    """The tensors inside a tensor subclass, by name, and its context; none of a plain tensor.

    What a subclass holds beside tensors, such as the mesh of a DTensor, is a part of the context.
    """
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return {}, None
    names, context = flatten()
    held = {name: getattr(tensor, name) for name in names}
    parts = {name: each for name, each in held.items() if isinstance(each, Tensor)}
    others = [each for name, each in held.items() if name not in parts]
    return parts, (context, *others) if others else context


def opaque_value(value: Any) -> Any:
    """The value of an opaque type that a graph input stands for; None for another input."""
    return getattr(value, "real_obj", None) if isinstance(value, FakeScriptObject) else None


def is_opaque_value(kind: type) -> bool:
    """Whether objects of this class are values that ops take as they are."""
    return is_opaque_value_type(kind)


def opaque_source(value: Any) -> tuple[str, dict[str, type]]:
    """Python source of a value of an opaque type, and the classes that it names."""
    return get_opaque_obj_repr(value)


def normal_alias(tensor: Tensor) -> Tensor:
    """The memory of an inference tensor as a tensor that may be written in any mode."""
    return alias_of(tensor.untyped_storage(), tensor.dtype, part_of_storage(tensor))


def write_back(tensor: Tensor, content: Tensor, dim: int = 0, rows: Tensor | None = None) -> None:
    """Restore `tensor`, or `rows` of its dimension `dim`, to saved `content`.

    A dimension of stride 0 has one element in memory.
    """
    with torch.inference_mode():  # in which tensors of either kind may be written
        if rows is not None:
            tensor.index_copy_(dim, rows, content)
            return
        for axis, step in enumerate(tensor.stride()):
            if step == 0 and tensor.size(axis):
                tensor, content = tensor.narrow(axis, 0, 1), content.narrow(axis, 0, 1)
        tensor.copy_(content)


def without_regions() -> AbstractContextManager[Any]:
    """Run `@torch.compile` regions uncompiled. Under a dispatch mode torch would do so as well, and
    for all later calls, too: it marks a frame that it skips."""
    loaded = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def never_traced(fn: Any) -> None:
    """Dynamo runs `fn` and what it calls as they are."""
    skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(fn.__code__, skipped)


class LightDispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose handler does not import Dynamo when it is first called.

    Torch wraps the handlers of modes in `torch._disable_dynamo`, which imports it. This mark of the
    handler's code does the same: neither the handler nor what it calls is traced. What a collective
    calls in a thread of its own, to which torch hands the modes of the caller, is a part of the
    collective and not given to the handler.
    """

    supports_higher_order_operators = True
    sees_inside = False
    """Whether the handler is given what an operator of higher order calls, in place of itself."""
    _thread = 0

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        if (handler := cls.__dict__.get("__torch_dispatch__")) is not None:

            def in_own_thread(
                self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if self._thread != get_ident():
                    return func(*args, **(kwargs or {}))
                if self.sees_inside and is_higher_order(func):
                    with self:
                        return run_higher_order(func, args, kwargs or {})
                return handler(self, func, types, args, kwargs)

            never_traced(in_own_thread)
            cls.__torch_dispatch__ = in_own_thread  # type: ignore[method-assign]

    def __enter__(self) -> Any:
        self._thread = get_ident()
        entered = super().__enter__()  # type: ignore[no-untyped-call]
        _tell_guards()
        return entered

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _tell_guards()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def _tell_guards() -> None:
    """Tell Dynamo's guards in this thread whether a mode of this thread keeps them from passing.

    Torch keeps that in a variable of the process, which is wrong for good once two threads have
    left their modes in the order in which they entered them: each call of a compiled region that
    runs compiled under a mode would compile it again.
    """
    set_is_in_mode_without_ignore_compile_internals(
        not all(mode.ignore_compile_internals() for mode in _dispatch_modes())
    )
