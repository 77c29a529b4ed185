"""Regions of a trace: what the call of one module left in the graph, and when it may be copied.

Another call of an equal module may copy the nodes of a region, with its own weights, if its trace
could not have differed:

- The modules are equal in all that is reachable from them. Objects are paired one to one, so that
  comparisons of identity have the same results; what is not compared by value is the same object.
- The arguments have the same form, and torch is in the same state (gradients, autocast, …).
- The region reads no other module, asks for no identity, changes no Python state, and returns
  tensors of its own.
- An integer or a string of a module may differ, such as the name or the number of a layer, if it is
  never read or only passed to operators, itself or in an object that only stores it; an integer
  only to custom ones.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.lazy import LazyConstantVariable, LazyVariableTracker
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
from torch.utils._pytree import tree_map

from .passed_values import Names, may_differ, passed_within, text
from .reachable import CONTAINERS, is_without_modules, knows_no_module, only_stores


class Reads:
    """The sources by which a trace has read each object."""

    def __init__(self) -> None:
        self._read: list[tuple[Any, Any]] = []
        self._sources: dict[int, list[Any]] = {}
        self._known = 0

    def add(self, source: Any, value: Any) -> None:
        self._read.append((source, value))

    def of(self, value: Any) -> list[Any]:
        for source, each in self._read[self._known :]:
            self._sources.setdefault(id(each), []).append(source)
        self._known = len(self._read)
        return self._sources.get(id(value), [])

    def clear(self) -> None:
        self._read.clear()
        self._sources.clear()
        self._known = 0


@dataclass
class Region:
    """The call of one module, while it is traced and after."""

    module: torch.nn.Module
    source: Any
    inputs: list[Any]
    """Variables of the tensors among the arguments that the trace computed."""
    tx: Any
    names: Names
    all_reads: Reads
    """What the trace has read, in this region or elsewhere."""
    reads: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """Source, value and variable of each value that was read; no variable where it was copied."""
    opened: list[Any] = field(default_factory=list)
    """Objects into whose `__dict__` it looked: what was read of it before shows in no read."""
    makes: set[type] = field(default_factory=set)
    """Classes that are opaque to torch, of which Dynamo made objects."""
    unseen: bool = False
    """Whether something looked into an object without a read."""
    loads_change: bool = False
    """Whether it read a value that the trace had given to an attribute."""
    functions: set[Any] = field(default_factory=set)
    """What was inlined: functions, and the code of those that were made while tracing."""
    nodes: list[torch.fx.Node] = field(default_factory=list)
    own: list[tuple[str, Any, Any, bool]] = field(default_factory=list)
    """Expression, source and value of what was read below the module, and whether it became a
    variable: each once."""
    beyond: list[tuple[Any, Any, Any]] = field(default_factory=list)
    """What was read by a path outside the module, now or before, as in `reads`."""
    elsewhere: dict[int, Any] = field(default_factory=dict)
    """The values of `beyond`, and what they can reach, by identity."""
    outside: list[torch.fx.Node] = field(default_factory=list)
    """Placeholders that nodes use, besides arguments."""
    result: Any = None
    """The nodes of the result; a tuple for a tuple."""
    values: Any = None
    """What a copy needs to know of the example values of the nodes."""

    def __post_init__(self) -> None:
        self.pattern, self._codes = pattern_of(self.source), dict[str, Any]()
        self.given = [each.as_proxy().node for each in self.inputs]
        self._modes = torch._C._dynamo.guards.GlobalStateGuard()
        self._inference = torch.is_inference_mode_enabled()
        self.changes = changes_of(self.tx)
        self._before = self._written()
        self._last = next(iter(reversed(self.tx.output.graph.nodes)), None)

    @property
    def name(self) -> str:
        return text(self.source)

    def is_now(self) -> bool:
        """Whether torch is in the state in which the region began."""
        inference = torch.is_inference_mode_enabled()
        return (
            self._modes.check()
            and inference is self._inference
            and changes_of(self.tx) == self.changes
        )

    def code(self, expression: str) -> Any:
        """Finds the value of an expression, with the module of a call as `module`."""
        if expression not in self._codes:
            moved = self.pattern.sub("module", expression)
            self._codes[expression] = compile(moved, "<place>", "eval")
        return self._codes[expression]

    def holds(self, source: Any) -> bool:
        """Whether a source is the module's, or of something below it."""
        return self.pattern.search(text(source)) is not None

    def end(self, result: Any) -> str | None:
        """Note what the call has left; why it may not be copied, if so."""
        erased = self._last is not None and self._last._erased
        if erased or self.loads_change or not self.is_now() or self._before != self._written():
            return "changes modes, sizes or attributes, or reads one that was changed"
        for node in reversed(self.tx.output.graph.nodes):
            if node is self._last:
                break
            if node.op != "placeholder":
                self.nodes.insert(0, node)
        self.result = self._nodes_of(result)
        if self.result is None:
            return "returns more than tensors that it made"
        if (obstacle := self._obstacle()) is not None:
            return obstacle
        built = {(text(s), id(value)) for s, value, variable in self.reads if variable is not None}
        reads = {(text(s), id(value)): (s, value) for s, value, _ in self.reads if self.holds(s)}
        self.own = [(each[0], *read, each in built) for each, read in reads.items()]
        for node in self.nodes:
            if not may_differ(node):
                passed = passed_within((node.args, node.kwargs))
                self.names.inspected |= {text(each.source) for each in passed}
        return None

    def _written(self) -> Any:
        """What a call may change without a node in the graph."""
        values = [node.meta["example_value"] for node in self.given]
        return [*map(metadata, values)], changes_of(self.tx)

    def _nodes_of(self, result: Any) -> Any:
        """The nodes of a result; None if it has others than tensors of the region."""
        if type(result) is TupleVariable:
            items = [None if _is_none(each) else self._node_of(each) for each in result.items]
            return None if False in items else tuple(items)
        return self._node_of(result) or None

    def _node_of(self, result: Any) -> Any:
        node = result.as_proxy().node if type(result) is TensorVariable else None
        return node if node in self.given or node in self.nodes else False

    def _obstacle(self) -> str | None:
        """What in the region prevents that it is copied."""
        inside = {*self.nodes, *self.given}
        used = {each for node in self.nodes for each in node.all_input_nodes} - inside
        self.outside = [node for node in self.tx.output.graph.nodes if node in used]
        for node in self.nodes:
            if (
                node.op not in ("call_function", "call_method")
                or isinstance(node.target, torch._ops.HigherOrderOperator)
                or _switches_mode(node)
                or "unbacked_bindings" in node.meta
            ):
                return f"calls {node.target}"
        for node in self.outside:
            if node.op != "placeholder":
                return f"uses {node.name}, which is neither an argument nor an input of the model"
        for function in self.functions:
            if not knows_no_module(function):
                return f"{getattr(function, '__qualname__', function)} can reach other modules"
        for kind in self.makes:
            if not only_stores(kind):
                return f"makes a {kind.__qualname__}, which may do more than store its arguments"
        tree = [*self.module.modules()]
        for source, value, variable in self.reads:
            if not self._may_be_read(tree, source, value, variable):
                return f"reads {text(source)}, which can reach other modules"
        return None

    def _may_be_read(
        self, tree: list[torch.nn.Module], source: Any, value: Any, variable: Any
    ) -> bool:
        """Whether a value that was read may be the same for each module that equals the region's;
        notes what must be."""
        first = getattr(variable, "source", None) or source
        if self.holds(source) and self.holds(first):
            return not isinstance(value, torch.nn.Module) or any(value is each for each in tree)
        self.beyond.append((first if self.holds(source) else source, value, variable))
        reached: dict[int, Any] = {}
        # the content of a container that was read before shows in no read here
        shows = self.holds(source) and not isinstance(value, (*CONTAINERS, torch.nn.Module))
        may = shows or is_without_modules(value, reached, tree)
        self.elsewhere |= {id(value): value} | reached
        return may


def _switches_mode(node: torch.fx.Node) -> bool:
    """Whether a node may have been added for an effect on the trace, such as autocast."""
    ops = torch._ops.OpOverload, torch._ops.OpOverloadPacket
    return "example_value" not in node.meta and not isinstance(node.target, ops)


def _is_none(variable: Any) -> bool:
    return isinstance(variable, ConstantVariable) and variable.as_python_constant() is None


def pattern_of(source: Any) -> re.Pattern[str]:
    """Finds a source in the expressions of what is below it."""
    return re.compile(re.escape(text(source)) + r"(?!\w)")


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


@dataclass(frozen=True)
class Change:
    """A value that the trace gave to an attribute of an object that was there before."""

    owner: Any
    name: str
    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Change) and (
            self.owner is other.owner and self.name == other.name and self.value is other.value
        )


def changes_of(tx: Any) -> list[Change] | None:
    """What the trace has changed in objects that were there before; None if it is more than
    attributes of plain objects."""
    effects, changes = tx.output.side_effects, []
    for each in effects.id_to_variable.values():
        if type(each) is TensorVariable and each not in effects.store_attr_mutations:
            continue
        if "Existing" not in type(each.mutation_type).__name__ or not effects.is_modified(each):
            continue
        if type(each) is not UserDefinedObjectVariable:
            return None
        if each not in effects.store_attr_mutations:
            return None
        written = effects.store_attr_mutations[each]
        changes += [Change(each, name, value) for name, value in written.items()]
    return changes


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
