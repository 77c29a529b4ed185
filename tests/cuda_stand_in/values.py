"""Values for the stand-in: each CUDA kernel of aten is a host function that runs the CPU kernel.

The host function is put on the current stream with cudaLaunchHostFunc, so it is ordered, captured
into graphs and replayed as a kernel would be. It holds addresses, as a kernel does, never tensors:
a graph that outlives its memory computes with whatever is there now.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

if __name__ != "tests.cuda_stand_in.values":  # pytest names this package otherwise
    raise ImportError("import tests.cuda_stand_in.values: a second copy has a state of its own")

cudart = ctypes.CDLL("libcudart.so.13")
_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
cudart.cudaLaunchHostFunc.argtypes = [ctypes.c_void_p, _HOST_FUNCTION, ctypes.c_void_p]

errors: list[BaseException] = []
"""What host functions raised. A kernel has no caller to raise to; tests look here."""

_bodies: dict[int, Callable[[], None]] = {}
_computing = True
_keys = itertools.count(1)


def _run(key: int) -> None:
    try:
        with torch.no_grad(), _disable_current_modes():
            _bodies[key]()
    except BaseException as error:
        errors.append(error)
        traceback.print_exc()


_host_function = _HOST_FUNCTION(_run)


def on_stream(name: str, body: Callable[[], None], launched: Any = ()) -> None:
    """Submit `body` to the current stream, where a kernel called `name` would run.

    In a capture the node has the addresses in `launched`: the first as a parameter after an int,
    the others in one struct, as those of `TensorIterator`.
    """
    key = next(_keys)
    if torch.cuda.is_current_stream_capturing():
        leaves = tree_leaves(launched)
        places = [each.first() for each in leaves if isinstance(each, Address)]
        sizes = [4, *(8 for _ in places[:1]), *(8 * len(places[1:]) for _ in places[1:2])]
        data = struct.pack(f"=i{len(places)}q", 0, *places)
        of_each = (ctypes.c_int * len(sizes))(*sizes)
        cudart.stand_in_next_is_kernel(name.encode(), data, of_each, len(sizes))
    _bodies[key] = body if _computing else _nothing  # kept for good: a graph may run it again
    stream = torch.cuda.current_stream().cuda_stream
    status = cudart.cudaLaunchHostFunc(stream, _host_function, key)
    if status:
        raise torch.AcceleratorError(f"CUDA error {status} in {name}")


def _nothing() -> None:
    pass


def drawing(body: Callable[[], None], generators: list[torch.Generator]) -> Callable[[], None]:
    """`body` with random numbers by the state that the device's generator has now, at the launch.
    That state cannot be asked for in a capture."""
    if torch.cuda.is_current_stream_capturing():
        return body
    device = torch.cuda.current_device()
    generator = next(iter(generators), torch.cuda.default_generators[device])
    offset = generator.get_offset()
    seed = hash((generator.initial_seed(), offset))
    generator.set_offset(offset + 4)

    def seeded() -> None:
        before = torch.get_rng_state()
        torch.default_generator.manual_seed(seed)
        try:
            body()
        finally:
            torch.set_rng_state(before)

    return seeded


@contextmanager
def without_computing() -> Iterator[None]:
    """Kernels are launched and do nothing: for models of which only the memory is of interest."""
    global _computing
    _computing = False
    cudart.stand_in_compute(False)
    yield
    _computing = True
    cudart.stand_in_compute(True)


class Address:
    """Where a tensor's elements are: what a kernel is launched with."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.start, self.num_bytes = storage.data_ptr(), storage.nbytes()
        self.dtype = tensor.dtype
        self.view = (tensor.storage_offset(), tensor.size(), tensor.stride())

    def first(self) -> int:
        """Of the first element."""
        return self.start + self.view[0] * self.dtype.itemsize

    def on_cpu(self) -> torch.Tensor:
        """A CPU tensor on the same memory, which it does not own."""
        cpu = torch.device("cpu")
        memory = torch._C._construct_storage_from_data_pointer(self.start, cpu, self.num_bytes)
        return torch.empty(0, dtype=self.dtype, device=cpu).set_(memory, *self.view)


def launch_argument(value: Any) -> Any:
    """A device tensor by address, a CPU scalar tensor by value, as launches pass them."""
    if isinstance(value, torch.Tensor):
        return Address(value) if value.is_cuda else value.clone()
    return value


def cpu_argument(value: Any) -> Any:
    match value:
        case Address():
            return value.on_cpu()
        case torch.device():
            return torch.device("cpu")
        case torch.Generator():
            return None
    return value


def _meta_argument(value: Any) -> Any:
    match value:
        case torch.Tensor() if value.dim() or value.is_cuda:
            strided = value.size(), value.stride()
            return torch.empty_strided(*strided, dtype=value.dtype, device="meta")
        case torch.Tensor():
            return value.to("meta")
        case torch.device():
            return torch.device("meta")
        case torch.Generator():
            return None
    return value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _launch_arguments(arguments: Any) -> Any:
    return tree_map(launch_argument, arguments, is_leaf=_is_tensor)


def cpu_arguments(arguments: Any) -> Any:
    return tree_map(cpu_argument, arguments, is_leaf=lambda value: isinstance(value, Address))


def _shapes(op: Any, args: Any, kwargs: Any) -> Any:
    meta = tree_map(_meta_argument, (args, kwargs), is_leaf=_is_tensor)
    return op(*meta[0], **meta[1])


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


SIZE_IS_DATA = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
    "aten::equal",
    "aten::repeat_interleave.Tensor",
)
"""Ops that wait for the device, since their results' sizes or values are needed on the host."""


def kernel_of(op: Any) -> Callable[..., Any]:
    """The CUDA kernel of an aten overload."""
    schema = op._schema
    name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
    written = [
        (position, argument)
        for position, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def launch(body: Callable[[], None], args: Any, kwargs: Any, launched: Any) -> None:
        if torch.Tag.nondeterministic_seeded in op.tags:
            given = tree_leaves((args, kwargs))
            body = drawing(body, [each for each in given if isinstance(each, torch.Generator)])
        on_stream(name, body, launched)

    def writing(args: Any, kwargs: Any) -> Any:
        given = [args[at] if at < len(args) else kwargs.get(a.name) for at, a in written]
        if any(argument.is_out for _, argument in written):
            for out, made in zip(given, _as_tuple(_shapes(op, args, kwargs)), strict=False):
                if _is_tensor(out) and out.shape != made.shape:
                    out.resize_(made.shape)
        launched = _launch_arguments((args, kwargs))

        def body() -> None:
            on_cpu = cpu_arguments(launched)
            op(*on_cpu[0], **on_cpu[1])

        launch(body, args, kwargs, launched)
        if not schema.returns:
            return None
        return given[0] if len(schema.returns) == 1 else tuple(given)

    def making(args: Any, kwargs: Any) -> Any:
        made = _shapes(op, args, kwargs)
        outputs = [
            torch.empty_strided(each.size(), each.stride(), dtype=each.dtype, device="cuda")
            if _is_tensor(each)
            else each
            for each in _as_tuple(made)
        ]
        launched = _launch_arguments((args, kwargs))
        addresses = [Address(each) if _is_tensor(each) else None for each in outputs]

        def body() -> None:
            on_cpu = cpu_arguments(launched)
            results = _as_tuple(op(*on_cpu[0], **on_cpu[1]))
            for address, result in zip(addresses, results, strict=True):
                if address is not None:
                    address.on_cpu().copy_(result)

        launch(body, args, kwargs, (launched, addresses))
        return type(made)(outputs) if isinstance(made, (tuple, list)) else outputs[0]

    def waiting(args: Any, kwargs: Any) -> Any:
        torch.cuda.current_stream().synchronize()
        on_cpu = cpu_arguments(_launch_arguments((args, kwargs)))
        results = op(*on_cpu[0], **on_cpu[1])
        return tree_map(lambda each: each.cuda() if _is_tensor(each) else each, results)

    run = waiting if name in SIZE_IS_DATA else writing if written else making

    def kernel(*args: Any, **kwargs: Any) -> Any:
        tensors = (t for t in tree_leaves((args, kwargs)) if _is_tensor(t) and t.is_cuda)
        device = next(
            (t.device for t in tensors), torch.device("cuda", torch.cuda.current_device())
        )
        by_mask = name == "aten::index.Tensor" and any(
            _is_tensor(index) and index.dtype in (torch.bool, torch.uint8) for index in args[1]
        )
        with torch.no_grad(), _disable_current_modes(), torch.cuda.device(device):
            return (waiting if by_mask else run)(args, kwargs)

    return kernel


def copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """`aten::copy_` between host and device: waits where CUDA's copy may wait (CUDA Runtime API,
    "API synchronization behavior")."""
    device = target.device if target.is_cuda else source.device
    with torch.no_grad(), _disable_current_modes(), torch.cuda.device(device):
        if target.numel() == 0:
            return target
        stream, capturing = torch.cuda.current_stream(), torch.cuda.is_current_stream_capturing()
        host = source if target.is_cuda else target
        if capturing and not host.is_cuda and not host.is_pinned():
            raise RuntimeError(
                "Cannot copy between CPU and CUDA tensors during CUDA graph capture unless the "
                "CPU tensor is pinned."
            )
        if target.is_cuda and source.is_cuda:
            to, origin = Address(target), Address(source)
            on_stream("copy", lambda: _copy(to.on_cpu(), origin.on_cpu()), (to, origin))
        elif target.is_cuda:
            to = Address(target)
            late = source.is_pinned() and (non_blocking or capturing)  # read when the copy runs
            held = source if late else source.clone()
            on_stream("copy to the device", lambda: _copy(to.on_cpu(), held), to)
            if not late:  # the driver may wait for the stream to stage pageable memory
                stream.synchronize()
        else:
            origin = Address(source)
            if target.is_pinned() and (non_blocking or capturing):
                on_stream("copy to the host", lambda: _copy(target, origin.on_cpu()), origin)
            else:
                stream.synchronize()
                _copy(target, origin.on_cpu())
        return target


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source.expand_as(target))


NATIVE = (
    "empty",
    "empty_strided",
    "set_",
    "resize_",
    "resize_as_",
    "as_strided",
    "view",
    "_reshape_alias",
    "view_as_real",
    "view_as_complex",
    "unfold",
    "is_set_to",
    "lift_fresh",
    "record_stream",
    "is_pinned",
    "_pin_memory",
    "pin_memory",
    "_local_scalar_dense",
    "item",
    "copy_",
    "mm",
    "addmm",
    "_addmm_activation",
    "bmm",
    "baddbmm",
    "_fused_sdp_choice",
    "_efficientzerotensor",
    "empty_quantized",
)
"""Ops whose own CUDA implementation launches no kernel, only copies, or only calls cuBLAS, and is
not replaced."""


def install() -> torch.library.Library:
    """Register the kernels. They are there as long as the returned library is alive."""
    torch.cuda.init()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an override is what is meant
        for full_name in torch._C._dispatch_get_all_op_names():
            base, _, overload = full_name.removeprefix("aten::").partition(".")
            if not full_name.startswith("aten::") or base in NATIVE:
                continue
            if not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA"):
                continue
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if _makes_a_view(op._schema) or not _takes_tensors(op._schema):
                continue
            name = full_name.removeprefix("aten::")
            library.impl(name, kernel_of(op), "CUDA", allow_override=True)
        library.impl("copy_", copy_, "CUDA", allow_override=True)
    return library


def _makes_a_view(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _takes_tensors(schema: Any) -> bool:
    return any("Tensor" in str(argument.type) for argument in schema.arguments)
