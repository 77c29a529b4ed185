"""Content hash of a piece. Pieces with equal hashes share generated code.

The hashed text has one line per node; nodes are numbered by position. It contains what code
generation reads: operators (custom ops with schema and source of the implementation), arguments,
constants by value, and for every value its dtype, device, shape, strides, layout and storage
offset, with symbols named by first appearance, and which values share memory. It contains no names,
file locations or line numbers. Where a weight lies that nothing writes to does not matter, apart
from its alignment: each counts as memory of its own.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Collection
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ...torch_compat.basics.frames import is_torch_file
from ...torch_compat.basics.ops import is_op, overload_of, triton_call
from ...torch_compat.basics.symbolic import expression_of
from ...torch_compat.basics.tensors import storage_id, subclass_parts
from ..conditions.code import fingerprint as source_fingerprint
from ..conditions.kinds import KINDS
from ..conditions.torch_functions import TENSOR, names_read
from ..conditions.values import (
    VERSIONED,
    Undescribable,
    class_name,
    class_text,
    package_of,
    stable_text,
    tensor_digest,
)
from ..ir.ops import is_custom
from ..ir.serialization import encode
from .piece import WEIGHT

ALIGNMENT = 16
"""Bytes: how generated code may assume an input to be aligned."""


def fingerprint(graph: Graph, root: torch.nn.Module, cut_at: Collection[str] = ()) -> str:
    """sha256, in hex, of the canonical text of `graph`; `root` holds its constants.

    `cut_at` are ops that generated code calls as they are. Raises Undescribable.
    """
    return hashlib.sha256(canonical_text(graph, root, cut_at).encode()).hexdigest()


def canonical_text(graph: Graph, root: torch.nn.Module, cut_at: Collection[str] = ()) -> str:
    """The text that is hashed; comparing two texts shows how pieces differ."""
    writer = _Writer(root)
    writer.see(graph)
    lines = [writer.line(node) for node in graph.nodes] + writer.schemas(cut_at)
    for space, names in names_read(graph.nodes).items():  # a program may have replaced some
        held = torch.Tensor if space == TENSOR else sys.modules[space]
        lines.append(f"{space} = {KINDS['added'].observe(held, names)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Extent:
    """Memory that counts as one: a storage, or the part of one that a weight begins at."""

    number: int
    begin: int


class _Writer:
    def __init__(self, root: torch.nn.Module) -> None:
        self._root = root
        self._numbers: dict[Node, int] = {}
        self._symbols: dict[Any, Any] = {}
        self._sizes: dict[Any, str] = {}
        self._memory: dict[int, Extent] = {}
        """By storage."""
        self._of_node: dict[Node, dict[int, Extent]] = {}
        """The same for each value: weights that share a storage have memory of their own here."""
        self._inputs: dict[int, Extent] = {}
        """That of the inputs of the node that is written."""
        self._node: Node
        """The one that is written."""
        self._count = 0
        self._ops: dict[str, Node] = {}
        self._bases: dict[Node, torch.Tensor] = {}
        """Of placeholders that share memory which may be written, what each is a view of: generated
        code takes that in place of them."""

    def see(self, graph: Graph) -> None:
        """Look at all placeholders, before lines are written."""
        groups: dict[int, list[Node]] = {}
        for node in graph.find_nodes(op="placeholder"):
            value = node.meta.get("example_value")
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                groups.setdefault(storage_id(value), []).append(node)
        for nodes in groups.values():
            for node in nodes if len(nodes) > 1 else ():
                base = node.meta["example_value"]._base
                if base is not None and WEIGHT not in node.meta:
                    self._bases[node] = base

    def line(self, node: Node) -> str:
        self._numbers[node] = len(self._numbers)
        self._node = node
        self._inputs, self._of_node[node] = {}, {}
        for used in node.all_input_nodes:
            self._inputs = {**self._of_node[used], **self._inputs}
        launch = triton_call(node)
        parts = [
            node.op,
            "" if node.op in ("placeholder", "output") else self._target(node),
            self._argument(node.args),
            self._argument(node.kwargs if launch is None else launch[1]),
            "" if launch is None else source_fingerprint(launch[0]),
            self._value(node.meta.get("example_value")),
            *([self._value(self._bases[node])] if node in self._bases else ()),
        ]
        return f"%{self._numbers[node]} " + " | ".join(parts)

    def schemas(self, cut_at: Collection[str]) -> list[str]:
        """Digest of schema and source of each custom op, which generated code may inline; of an op
        that it only calls, of schema and fake implementation."""
        lines = []
        for name, node in sorted(self._ops.items()):
            kind = KINDS["called op" if overload_of(node).name() in cut_at else "op"]
            parts: Any = kind.observe(node.target, None)
            digest = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()
            lines.append(f"{name} = {digest}")
        return lines

    def _target(self, node: Node) -> str:
        if node.op == "get_attr":
            return self._constant(str(node.target))
        if isinstance(node.target, str):
            return node.target
        if is_op(node.target):
            name = str(node.target)
            if is_custom(node.target):
                self._ops[name] = node
            return name
        name = getattr(node.target, "__qualname__", None) or node.target.__name__
        code = node.target.__code__ if isinstance(node.target, FunctionType) else None
        users = code is not None and not is_torch_file(code.co_filename)
        module = getattr(node.target, "__module__", None) or stable_text(node.target)
        return f"{module}.{name} {source_fingerprint(node.target) if users else ''}"

    def _constant(self, target: str) -> str:
        value: Any = self._root
        for part in target.split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            return f"graph({canonical_text(value.graph, value)})"
        if isinstance(value, torch.Tensor):
            return f"tensor({self._value(value)}, {tensor_digest(value)})"
        return repr(encode(value))

    def _argument(self, value: Any) -> str:
        match value:
            case Node():
                return f"%{self._numbers[value]}"
            case tuple() | list():
                items = ", ".join(self._argument(item) for item in value)
                return f"({items})" if isinstance(value, tuple) else f"[{items}]"
            case dict():
                items = ", ".join(f"{k!r}: {self._argument(v)}" for k, v in sorted(value.items()))
                return f"{{{items}}}"
            case slice():
                return f"slice{self._argument((value.start, value.stop, value.step))}"
            case bool() | int() | float() | str() | None:
                return repr(value)
        return stable_text(value)

    def _value(self, value: Any) -> str:
        match value:
            case torch.Tensor():
                return self._tensor(value)
            case torch.SymInt():
                return f"int {self._size(value)}"
            case torch.SymBool() | torch.SymFloat():
                return f"{type(value).__name__} {self._renamed(expression_of(value))}"
            case tuple() | list():
                return f"({', '.join(self._value(item) for item in value)})"
        return f"{type(value).__name__} {value!r}" if isinstance(value, (int, float)) else "-"

    def _tensor(self, tensor: torch.Tensor) -> str:
        strided = tensor.layout is torch.strided
        facts = [
            str(tensor.dtype),
            str(tensor.device),
            str(tensor.layout),
            f"[{', '.join(self._size(s) for s in tensor.shape)}]",
            f"[{', '.join(self._size(s) for s in tensor.stride())}]" if strided else "",
            *(self._place(tensor) if strided else ("", "")),
            "grad" if tensor.requires_grad else "",
            "conj" if tensor.is_conj() else "",
            "neg" if tensor.is_neg() else "",
        ]
        inner, context = subclass_parts(tensor)
        if inner:  # generated code unwraps tensors of this class and wraps its results
            facts += [tensor_class(type(tensor)), stable_text(context)]
            facts += [f"{name}: ({self._tensor(each)})" for name, each in inner.items()]
        return " ".join(facts)

    def _place(self, tensor: torch.Tensor) -> tuple[str, str]:
        """The offset in its memory, and the number of that."""
        storage = storage_id(tensor)
        offset: Any = tensor.storage_offset()
        weight = WEIGHT in self._node.meta
        memory = None if weight else self._inputs.get(storage) or self._memory.get(storage)
        if memory is None:
            elements = max(1, ALIGNMENT // tensor.element_size())
            memory = Extent(self._count, offset - offset % elements if weight else 0)
            self._count += 1
        self._memory.setdefault(storage, memory)
        self._of_node[self._node][storage] = memory
        begin = memory.begin
        return self._size(offset - begin if begin else offset), f"storage {memory.number}"

    def _size(self, size: int | torch.SymInt) -> str:
        return self._renamed(expression_of(size)) if isinstance(size, torch.SymInt) else str(size)

    def _renamed(self, expression: Any) -> str:
        import sympy  # a warm start reads only the sources of ops and needs no sympy

        if not isinstance(expression, sympy.Basic) or expression.is_Integer:
            return str(expression)
        if expression not in self._sizes:
            for symbol in sorted(expression.free_symbols, key=str):
                renamed = sympy.Symbol(f"S{len(self._symbols)}", integer=True)
                self._symbols.setdefault(symbol, renamed)
            self._sizes[expression] = sympy.srepr(expression.xreplace(self._symbols))
        return self._sizes[expression]


@functools.cache
def tensor_class(cls: type) -> str:
    """A class of tensors that hold others, with the version of its package.

    Its methods decide what a compiler computes, and nothing guards them. Raises Undescribable for
    a class that is no part of an installed package, which could change at any time.
    """
    package = package_of(cls)
    if package in VERSIONED:
        return class_name(cls)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    try:
        distribution = importlib.metadata.distribution(package)
        path = os.path.relpath(file, str(distribution.locate_file("")))
        if f"\n{path}," in f"\n{distribution.read_text('RECORD')}":
            return f"{class_text(cls)} of {package} {distribution.version}"
    except importlib.metadata.PackageNotFoundError:
        pass
    raise Undescribable(
        class_name(cls), "is a class of tensors, and no part of an installed package"
    )
