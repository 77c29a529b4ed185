"""Repairs of Inductor for the time of our compiles."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .ops import mutated_arguments
from .patch import compiler_lock, replaced
from .tensors import tree_leaves


@contextmanager
def reads_before_mutations() -> Iterator[None]:
    """Have Inductor compute what reads a tensor before the custom op that then mutates it.

    Inductor (2.11 to 2.13) gives such an op its place in the order of execution, and only then
    says what it mutates, which is what computes the pending reads of the old value: pointwise
    values that are used again later came after the op, and were computed from the new value.

    It also has `cat` take the memory of its operands for parts of the result. Where the result is
    mutated they are copied, for what reads an operand afterwards read the new value.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    kernels: Any = ir.FallbackKernel
    original = vars(kernels)["create"]
    concatenations: Any = ir.ConcatKernel
    concatenate = vars(concatenations)["create"]

    def create_cat(cls: Any, inputs: Any, dim: int) -> Any:
        if is_mutated(V.graph.current_node):
            inputs = [lowering.clone(each) for each in inputs]
        return concatenate.__func__(cls, inputs, dim)

    def create(cls: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(kernel, "_schema", None) is not None:
            for each in tree_leaves(list(mutated_arguments(kernel, args, kwargs))):
                if isinstance(each, ir.TensorBox):
                    each.realize()
                    V.graph.mark_buffer_mutated(each.get_name())
        return original.__func__(cls, kernel, *args, **kwargs)

    with (
        compiler_lock,
        replaced(kernels, "create", classmethod(create)),
        replaced(concatenations, "create", classmethod(create_cat)),
    ):
        yield


def is_mutated(node: torch.fx.Node) -> bool:
    """Whether anything in its graph may write to the result of `node`, also through a view."""
    from torch._library.utils import zip_schema

    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if user.op == "output":
            continue
        if schema is None:  # a part of several results, or an operation that may do anything
            if user.target is not operator.getitem or is_mutated(user):
                return True
            continue
        for argument, given in zip_schema(schema, user.args, user.kwargs):
            alias = argument.alias_info if node in tree_leaves(given) else None
            if alias is not None and (alias.is_write or is_mutated(user)):
                return True
    return False


def share_memory_of_parts(partitions: list[list[Any]], signatures: list[Any]) -> None:
    """Have all partitions that write parts of one tensor write into the same memory.

    The result of `cat` is allocated where the first of its parts is written, but its place in the
    order of execution is after the last. Inductor (2.11 to 2.13) takes it for an output of the
    partition of that place alone, and then allocates it anew in each partition that has a part:
    what the others wrote was lost. It becomes an output of the first of them, an input of the rest.
    """
    from torch._inductor import ir
    from torch._inductor.scheduler import get_layout_symints

    parts: dict[str, set[int]] = {}
    whole: dict[str, tuple[int, Any]] = {}
    for at, nodes in enumerate(partitions):
        for buffer in (output.node for node in nodes for output in node.get_outputs()):
            whole[buffer.get_name()] = at, buffer
            if isinstance(buffer.layout, ir.NonOwningLayout):
                parts.setdefault(buffer.layout.view.get_name(), set()).add(at)
    for name, writers in parts.items():
        last, buffer = whole.get(name, (0, None))
        first, *others = sorted({*writers, last})
        if first >= last:
            continue
        kept = any(output is buffer for output in signatures[last].output_nodes)
        signatures[first].symbol_inputs.update(get_layout_symints(buffer))
        signatures[first].output_nodes.append(buffer)
        for at in others:
            signatures[at].input_nodes[name] = buffer
            signatures[at].input_deallocation[name] = at == last and not kept
            if at != last:
                signatures[at].output_nodes.append(buffer)
