"""What functions of torch read when they run: names in the namespaces of torch and Python.

A graph calls `F.layer_norm`, which calls `torch.layer_norm`: a program that replaces the second
changes what the graph computes, and Dynamo guards the first alone. The names are found in the code
of the functions, and in that of the functions of torch that these lead to.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...torch_compat.basics.frames import is_torch_file
from .bytecode import attribute_names
from .code import closure_values
from .values import VERSIONED, unwrapped

OF_TORCH = (
    *("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "torch._decomp"),
    *("torch._higher_order_ops", "torch._prims_common"),
)
"""Modules that a warm start does not import. They are known by torch's version."""

TENSOR = "torch.Tensor"


def all_nodes(graph: GraphModule) -> list[Node]:
    """The nodes of a graph and of the graphs inside it, such as the body of a checkpoint."""
    inside = [each for each in graph.modules() if isinstance(each, GraphModule)]
    return [node for each in inside for node in each.graph.nodes]


def names_read(nodes: Iterable[Node]) -> dict[str, list[str]]:
    """The names of functions that the targets of `nodes` read, by module; TENSOR has methods."""
    targets = dict.fromkeys(node.target for node in nodes)
    methods = {target for target in targets if isinstance(target, str)}
    names: dict[str, set[str]] = {TENSOR: methods & {*dir(torch.Tensor)}}
    waiting: list[Any] = [target for target in targets if not isinstance(target, str)]
    waiting += [getattr(torch.Tensor, name) for name in sorted(names[TENSOR])]
    seen = set()
    while waiting:
        function = unwrapped(waiting.pop())
        code = getattr(function, "__code__", None)
        if code in seen or not isinstance(function, types.FunctionType):
            continue
        seen.add(code)
        if not is_torch_file(function.__code__.co_filename):
            continue
        waiting += closure_values(function).values()
        for space, name, value in _read_by(function):
            names.setdefault(space, set()).add(name)
            waiting.append(value)
    return {space: sorted(read) for space, read in sorted(names.items())}


def _read_by(function: types.FunctionType) -> Iterable[tuple[str, str, Any]]:
    """The functions in modules that a function may name: module, name, value."""
    names = sorted(attribute_names(function.__code__))
    spaces = [sys.modules.get(str(function.__globals__.get("__name__")))]
    for space in spaces:
        if space is None or space.__name__.startswith(OF_TORCH):
            continue
        for name in names:
            value = getattr(space, name, None)
            if isinstance(value, types.ModuleType):
                if value.__name__.partition(".")[0] in VERSIONED and value not in spaces:
                    spaces.append(value)
            elif callable(value) and not isinstance(value, type):
                yield space.__name__, name, value
