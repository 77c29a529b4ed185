"""The one file that touches torch's private names; a test looks at each of them.

Checked against torch 2.11, 2.12 and 2.13.
"""

from __future__ import annotations

# graphs: what recordings need below the public surface of torch
import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

__all__ = [
    "StorageWeakRef",
    "TorchDispatchMode",
    "tree_flatten",
    "tree_leaves",
    "tree_map_only",
    "tree_unflatten",
]


def without_modes() -> AbstractContextManager[Any]:
    """Run plainly: no dispatch mode sees what is called inside."""
    return _disable_current_modes()


def storage_id(tensor: Tensor) -> int:
    """Identity of the storage behind `tensor`; unique while a reference, even a weak one, lives."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


def weak_storage(tensor: Tensor) -> StorageWeakRef:
    """A weak reference to the storage behind `tensor`: while it lives, the identity stays taken."""
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def unowned_alias(tensor: Tensor) -> Tensor:
    """The same memory under a new tensor that does not keep it alive."""
    storage = tensor.untyped_storage()
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def is_composite(op: torch._ops.OpOverload) -> bool:
    """Whether `op` is only a composition of other operators."""
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    return op.has_kernel_for_dispatch_key(key)


def run_kernel(op: torch._ops.OpOverload, device: str, args: Any, kwargs: Any) -> Any:
    """Run the kernel of `op` for `device` (CPU, CUDA) past every mode.

    A mode that is on sees the operators called in the body of that kernel.
    """
    key = getattr(torch._C.DispatchKey, device)
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def raw_replay(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """The C++ replay of `graph`, bound: without the Python method that wraps it."""
    return super(torch.cuda.CUDAGraph, graph).replay


def node_count(graph: torch.cuda.CUDAGraph) -> int:
    """Nodes of a graph captured with `keep_graph=True`, asked of the driver torch has loaded."""
    driver = ctypes.CDLL("libcuda.so.1")
    nodes = ctypes.c_size_t()
    raw = ctypes.c_void_p(graph.raw_cuda_graph())
    status = driver.cuGraphGetNodes(raw, None, ctypes.byref(nodes))
    if status != 0:
        raise RuntimeError(f"cuGraphGetNodes returned CUDA driver error {status}")
    return nodes.value


def flush_host_cache() -> None:
    """Give cached pinned memory back."""
    torch._C._host_emptyCache()


def end_allocation_to_pool(device: int, pool: Any) -> None:
    """Undo what an invalidated capture leaves behind: `capture_end` raises before it does this."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
