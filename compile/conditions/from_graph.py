"""Conditions on the code that a traced graph calls: custom ops, Triton kernels, Python functions.

Of a splitting op, which is called and not compiled, only the schema and the fake implementation
count.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...torch_compat.basics.ops import op_name, triton_call
from ..ir.locations import node_location
from ..ir.ops import is_custom
from .conditions import ConditionTree
from .kinds import CALLED_OP, FUNCTION, INLINED_OP
from .places import OPS, reader
from .torch_functions import all_nodes
from .values import VERSIONED, Undescribable


def add_called_code(
    tree: ConditionTree, graph: GraphModule, model: torch.nn.Module, splits: Callable[[Node], bool]
) -> Iterator[str]:
    """Add a condition for each op, kernel and function; yields what cannot be described."""
    for node in all_nodes(graph):
        try:
            if is_custom(node.target):
                steps = op_name(node.target).split("::")
                tree.add(OPS, steps, CALLED_OP if splits(node) else INLINED_OP)
            elif (function := _function(node)) is not None:
                innermost = _innermost(function)
                root, name = str(innermost.__module__), innermost.__qualname__
                if reader(root, name.split("."), model)() is not function:
                    raise Undescribable(f"function {root}:{name}", "cannot be located by its name")
                tree.add(root, name.split("."), FUNCTION)
        except Undescribable as error:
            yield f"{error} ({node_location(node)})"


def _function(node: Node) -> Any:
    """The Triton kernel or the user's function that a node calls; None if it calls neither."""
    if launch := triton_call(node):
        return launch[0]
    target: Any = node.target
    home = getattr(target, "__globals__", {}).get("__name__") or getattr(target, "__module__", "")
    ignored = not hasattr(target, "__code__") or str(home).partition(".")[0] in VERSIONED
    return None if ignored else target


def _innermost(kernel: Any) -> Any:
    """The function of a Triton kernel: an autotuner holds a kernel, which holds a function."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel
