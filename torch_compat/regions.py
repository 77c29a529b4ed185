"""Regions of a trace: what the call of one module left in the graph, and when it may be copied.

Another call of an equal module may copy the nodes of a region, with its own weights, if its trace
could not have differed:

- The modules are equal in all that is reachable from them. Objects are paired one to one, so that
  comparisons of identity have the same results; what is not compared by value is the same object.
- The arguments have the same form, and torch is in the same state (gradients, autocast, …).
- The region reads no other module, asks for no identity, changes no Python state, and returns
  tensors of its own.
- A string may differ, such as the name of a layer, if it is only passed to operators.
"""

from __future__ import annotations

import functools
import logging
import re
import types
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.lazy import LazyConstantVariable, LazyVariableTracker
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_map

from .inlined import is_torch_file

PRIMITIVE = (bool, int, float, complex, str, bytes, types.NoneType, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset)
_IDENTITY = ("id", "hash", "__hash__")
_LEAVES = (
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type, torch.Tensor),
    *(Enum, functools._lru_cache_wrapper, logging.Logger, property, staticmethod, classmethod),
)
_LEAF_PACKAGES = ("torch", "typing", "re")
_MOST_OBJECTS = 200
_FEWEST_NODES = 3


class Name(str):
    """A string of a module in the arguments of a node; `source` is where it was read."""

    source: Any

    @staticmethod
    def within(value: Any) -> bool:
        """Whether there is one among the arguments of a node."""
        found: list[Any] = []
        map_aggregate(value, lambda each: found.append(each) if type(each) is Name else None)
        return bool(found)


@dataclass
class Names:
    """Strings of modules, by expression, that were passed to operators, and that were looked at."""

    passed: set[str] = field(default_factory=set)
    inspected: set[str] = field(default_factory=set)


@dataclass
class Region:
    """The call of one module, while it is traced and after."""

    module: torch.nn.Module
    source: Any
    inputs: list[Any]
    """Variables of the tensors among the arguments that the trace computed."""
    tx: Any
    reads: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Source, value and variable of each value that was read; no variable where it was copied."""
    functions: set[Any] = field(default_factory=set)
    """What was inlined: functions, and the code of those that were made while tracing."""
    nodes: list[torch.fx.Node] = field(default_factory=list)
    own: list[tuple[str, Any, Any, bool]] = field(default_factory=list)
    """Expression, source and value of what was read below the module, and whether it became a
    variable: each once."""
    elsewhere: list[Any] = field(default_factory=list)
    """Values that were read by a path outside the module, now or before: each once."""
    outside: list[torch.fx.Node] = field(default_factory=list)
    """Placeholders that nodes use, besides arguments."""
    result: Any = None
    """The nodes of the result; a tuple for a tuple."""
    values: Any = None
    """What a copy needs to know of the example values of the nodes."""

    def __post_init__(self) -> None:
        self.pattern = re.compile(re.escape(self.name) + r"(?!\w)")
        self.given = [each.as_proxy().node for each in self.inputs]
        self._modes = torch._C._dynamo.guards.GlobalStateGuard()
        self._inference = torch.is_inference_mode_enabled()
        self._before = self._written()
        self._last = next(iter(reversed(self.tx.output.graph.nodes)), None)

    @property
    def name(self) -> str:
        return text(self.source)

    def is_now(self) -> bool:
        """Whether torch is in the state in which the region began."""
        inference = torch.is_inference_mode_enabled()
        return self._modes.check() and inference is self._inference

    def holds(self, source: Any) -> bool:
        """Whether a source is the module's, or of something below it."""
        return self.pattern.search(text(source)) is not None

    def end(self, result: Any) -> bool:
        """Note what the call has left; whether it may be copied."""
        erased = self._last is not None and self._last._erased
        if erased or not self.is_now() or self._before != self._written():
            return False
        for node in reversed(self.tx.output.graph.nodes):
            if node is self._last:
                break
            if node.op != "placeholder":
                self.nodes.insert(0, node)
        self.result = self._nodes_of(result)
        if self.result is None or not self._can_be_copied():
            return False
        built = {(text(s), id(value)) for s, value, variable in self.reads if variable is not None}
        reads = {(text(s), id(value)): (s, value) for s, value, _ in self.reads if self.holds(s)}
        self.own = [(each[0], *read, each in built) for each, read in reads.items()]
        elsewhere = {
            id(value): value
            for source, value, variable in self.reads
            if not self.holds(source) or not self.holds(getattr(variable, "source", None) or source)
        }
        self.elsewhere = [*elsewhere.values()]
        return True

    def _written(self) -> Any:
        """What a call may change without a node in the graph."""
        written = self.tx.output.side_effects.store_attr_mutations
        values = [node.meta["example_value"] for node in self.given]
        return [*map(metadata, values)], sum(map(len, written.values()))

    def _nodes_of(self, result: Any) -> Any:
        """The nodes of a result; None if it has others than tensors of the region."""
        if type(result) is TupleVariable:
            items = [None if _is_none(each) else self._node_of(each) for each in result.items]
            return None if False in items else tuple(items)
        return self._node_of(result) or None

    def _node_of(self, result: Any) -> Any:
        node = result.as_proxy().node if type(result) is TensorVariable else None
        return node if node in self.given or node in self.nodes else False

    def _can_be_copied(self) -> bool:
        inside = {*self.nodes, *self.given}
        used = {each for node in self.nodes for each in node.all_input_nodes} - inside
        self.outside = [node for node in self.tx.output.graph.nodes if node in used]
        tree = {*self.module.modules()}
        return (
            len(self.nodes) >= _FEWEST_NODES
            and all(node.op in ("call_function", "call_method") for node in self.nodes)
            and not any(isinstance(n.target, torch._ops.HigherOrderOperator) for n in self.nodes)
            and not any(map(_switches_mode, self.nodes))
            and not any("unbacked_bindings" in node.meta for node in self.nodes)
            and all(node.op == "placeholder" for node in self.outside)
            and all(map(_knows_no_module, self.functions))
            and all(_may_be_read(self, tree, *each) for each in self.reads)
        )


def _switches_mode(node: torch.fx.Node) -> bool:
    """Whether a node may have been added for an effect on the trace, such as autocast."""
    ops = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    return "example_value" not in node.meta and not isinstance(node.target, ops)


def _knows_no_module(function: Any) -> bool:
    """Whether a function can reach no module but through its arguments, and asks for no identity.

    Dynamo reads globals and variables of enclosing functions once per trace, not once per region.
    """
    if isinstance(function, types.CodeType):
        names, values = _names_of(function), []
    elif not isinstance(function, types.FunctionType):
        return False
    elif is_torch_file(function.__code__.co_filename):
        return True
    else:
        names, known = _names_of(function.__code__), function.__globals__
        cells = map(_content, function.__closure__ or ())
        defaults = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        values = [*cells, *defaults, *(known[name] for name in names if name in known)]
    return not names & {*_IDENTITY} and all(map(_is_without_modules, values))


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing was assigned yet
        return None


def _names_of(code: types.CodeType) -> set[str]:
    nested = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return {*code.co_names}.union(*map(_names_of, nested))


def _is_without_modules(value: Any, seen: dict[int, Any] | None = None) -> bool:
    """Whether no module, and no means to ask for an identity, can be reached from a value."""
    seen = {} if seen is None else seen
    if id(value) in seen or isinstance(value, PRIMITIVE):
        return True
    seen[id(value)] = value
    if (
        isinstance(value, torch.nn.Module)
        or value is id
        or value is hash
        or len(seen) > _MOST_OBJECTS
    ):
        return False
    kind = type(value)
    if isinstance(value, _LEAVES) or kind.__module__.partition(".")[0] in _LEAF_PACKAGES:
        return True
    if isinstance(value, dict):
        inside = [*value, *value.values()]
    elif isinstance(value, CONTAINERS):
        inside = list(value)
    elif isinstance(value, types.MethodType):
        inside = [value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif hasattr(value, "__dict__") and not hasattr(kind, "__slots__"):
        inside = list(vars(value).values())
    else:
        return False
    return len(seen) < _MOST_OBJECTS and all(_is_without_modules(each, seen) for each in inside)


def _is_none(variable: Any) -> bool:
    return isinstance(variable, ConstantVariable) and variable.as_python_constant() is None


def _may_be_read(region: Region, tree: set[Any], source: Any, value: Any, variable: Any) -> bool:
    """Whether a value that a region read is the same for each module that equals its own."""
    if not region.holds(source):
        return _is_without_modules(value)
    if isinstance(value, torch.nn.Module):
        return value in tree
    # what was read by another expression before may be compared with it, and the content of a
    # container shows in no read here
    known = getattr(variable, "source", None) is None or region.holds(variable.source)
    return known or not isinstance(value, (*CONTAINERS, torch.Tensor))


def text(source: Any) -> str:
    return str(source.name)


def form_of(variable: Any, inputs: list[Any]) -> Any:
    """The form of an argument, by which calls are compared; None if it is not supported. Tensors
    that the trace computed are appended to `inputs`."""
    if isinstance(variable, LazyVariableTracker):
        if isinstance(variable, LazyConstantVariable) or variable.is_realized():
            variable = variable.realize()
        elif isinstance(variable.original_value(), torch.Tensor):
            return "source", text(variable.source)
    if type(variable) is TensorVariable and variable.source is not None:
        return "source", text(variable.source)
    if type(variable) is TensorVariable:
        nodes = [each.as_proxy().node for each in inputs]
        node = variable.as_proxy().node
        if node not in nodes:
            inputs.append(variable)
            nodes.append(node)
        return "tensor", nodes.index(node), metadata(node.meta["example_value"])
    if isinstance(variable, ConstantVariable):
        value = variable.as_python_constant()
        return "constant", type(value), repr(value)
    if type(variable) is TupleVariable:
        items = [form_of(each, inputs) for each in variable.items]
        return None if None in items else ("tuple", *items)
    return None


def form_of_node(node: torch.fx.Node) -> Any:
    """What is compared of the results of two nodes."""
    return tree_map(
        lambda value: metadata(value) if isinstance(value, torch.Tensor) else repr(value),
        node.meta.get("example_value"),
    )


def metadata(tensor: torch.Tensor) -> Any:
    return (
        type(tensor),
        tensor.dtype,
        tensor.device,
        tensor.layout,
        tensor.requires_grad,
        tensor.is_inference(),
        (*map(str, tensor.shape),),
        (*map(str, tensor.stride()),) if tensor.layout is torch.strided else None,
        str(tensor.storage_offset()) if tensor.layout is torch.strided else None,
    )
