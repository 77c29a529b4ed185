"""Nodes of CUDA graphs, as the driver tells of them while the graph is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, ClassVar

from .cuda import driver, driver_status

KINDS = (
    "kernel", "memcpy", "memset", "host function", "graph", "empty", "wait for event",
    "record event", "signal semaphore", "wait for semaphore", "allocation", "free",
    "memory operation", "conditional",
)  # fmt: skip
"""By CUgraphNodeType."""
_INVALID_VALUE = 1
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST = 1  # CU_MEMORYTYPE_HOST


@dataclass(slots=True)
class DriverNode:
    """One node. `launch` is a kernel's grid and block, or the bytes of a copy or fill."""

    kind: str
    kernel: str = ""
    launch: dict[str, Any] = field(default_factory=dict)
    pointers: list[int] = field(default_factory=list)
    """Addresses of memory in its parameters, in order."""
    unread: str = ""
    """Why there may be others that are not read."""


def driver_node(handle: int) -> DriverNode:
    """What the driver tells of a node; what it does not tell is in `unread`."""
    node, kind = ctypes.c_void_p(handle), ctypes.c_int()
    driver("cuGraphNodeGetType", node, ctypes.byref(kind))
    made = DriverNode(KINDS[kind.value] if kind.value < len(KINDS) else f"type {kind.value}")
    try:
        if made.kind in _READERS:
            _READERS[made.kind](node, made)
        elif made.kind != "empty":
            made.unread = f"the driver tells no parameters of a {made.kind}"
    except (RuntimeError, AttributeError) as error:  # an older driver has no such function
        made.unread = str(error)
    return made


def nodes_before(handle: int) -> list[int]:
    """The nodes that a node waits for."""
    node, count = ctypes.c_void_p(handle), ctypes.c_size_t()
    driver("cuGraphNodeGetDependencies_v2", node, None, None, ctypes.byref(count))
    nodes, edges = (ctypes.c_size_t * count.value)(), (ctypes.c_uint64 * count.value)()
    driver("cuGraphNodeGetDependencies_v2", node, nodes, edges, ctypes.byref(count))
    return list(nodes)


class _Kernel(ctypes.Structure):  # CUDA_KERNEL_NODE_PARAMS_v2
    _fields_: ClassVar = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


def _read_kernel(node: ctypes.c_void_p, made: DriverNode) -> None:
    params = _Kernel()
    driver("cuGraphKernelNodeGetParams_v2", node, ctypes.byref(params))
    made.launch = {"grid": [*params.grid], "block": [*params.block]}
    # one of both: a function is of one context, a kernel of a library of all
    of, handle = ("Func", params.function) if params.function else ("Kernel", params.kernel)
    name = ctypes.c_char_p()
    driver(f"cu{of}GetName", ctypes.byref(name), ctypes.c_void_p(handle))
    made.kernel = (name.value or b"").decode()
    for index, size in enumerate(_sizes(f"cu{of}GetParamInfo", ctypes.c_void_p(handle))):
        if not params.parameters:
            raise RuntimeError("the kernel was launched with a buffer of parameters")
        made.pointers += _pointers(ctypes.string_at(params.parameters[index], size))


def _sizes(query: str, handle: ctypes.c_void_p) -> Iterator[int]:
    """Bytes of each parameter of a kernel. Raises where the driver does not know."""
    offset, size, index = ctypes.c_size_t(), ctypes.c_size_t(), 0
    out = ctypes.byref(offset), ctypes.byref(size)
    while (error := driver_status(query, handle, ctypes.c_size_t(index), *out)) == 0:
        yield size.value
        index += 1
    if error != _INVALID_VALUE:  # of the index after the last
        raise RuntimeError(f"{query} returned CUDA driver error {error}")


def _pointers(data: bytes) -> Iterator[int]:
    """The addresses of memory in a parameter, which may be a struct."""
    kind = ctypes.c_int()
    for start in range(0, len(data) - 7, 8):
        word = int.from_bytes(data[start : start + 8], "little")
        asked = ctypes.byref(kind), _MEMORY_TYPE, ctypes.c_uint64(word)
        if word and driver_status("cuPointerGetAttribute", *asked) == 0:
            yield word


def _read_copy(node: ctypes.c_void_p, made: DriverNode) -> None:
    words = (ctypes.c_uint64 * 25)()  # CUDA_MEMCPY3D: source, target, and the extent
    driver("cuGraphMemcpyNodeGetParams", node, words)
    for end in (words[:11], words[11:22]):  # four offsets, kind of memory, address of either kind
        made.pointers.append(end[5] if end[4] & 0xFFFFFFFF == _HOST else end[6])
    made.launch = {"bytes": prod(words[22:])}


def _read_fill(node: ctypes.c_void_p, made: DriverNode) -> None:
    words = (ctypes.c_uint64 * 5)()  # CUDA_MEMSET_NODE_PARAMS
    driver("cuGraphMemsetNodeGetParams", node, words)
    target, _, value, width, height = words
    made.pointers.append(target)
    made.launch = {"bytes": (value >> 32) * width * height}  # bytes of an element, above its value


_READERS = {"kernel": _read_kernel, "memcpy": _read_copy, "memset": _read_fill}
