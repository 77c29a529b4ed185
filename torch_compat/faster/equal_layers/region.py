"""The call of one module in a trace: what it read and what it left in the graph."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._dynamo.variables import (
    ConstantVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
)
from torch._dynamo.variables.lazy import LazyConstantVariable, LazyVariableTracker

from .names import text
from .reachable import CONTAINERS, knows_no_module, only_stores, reaches_only


class Region:
    """The call of one module, while it is traced and after."""

    def __init__(self, module: torch.nn.Module, source: Any, args: list[Any], tx: Any) -> None:
        self.module, self.source, self.name = module, source, text(source)
        self.args: list[torch.fx.Node] = [variable.as_proxy().node for variable in args]
        """Tensors among the arguments that the trace computed."""
        self.reads: list[tuple[Any, Any, Any]] = []
        """Source, value and variable of each value that was read; no variable if it is lazy."""
        self.functions: set[Any] = set()
        """What was inlined: functions, and the code of those that were made while tracing."""
        self.labels: set[type] = set()
        """Classes that are opaque to torch, of which the module made objects."""
        self.obstacle: str | None = None
        """Why the region may not be copied."""
        self.nodes: list[torch.fx.Node] = []
        self.inputs: list[torch.fx.Node] = []
        """Placeholders that nodes use, besides arguments."""
        self.result: Any = None
        """The nodes of the result; a tuple for a tuple."""
        self.reads_below: list[tuple[str, Any, Any, bool]] = []
        """Expression, source and value of what was read below the module, and whether it became a
        variable: each once."""
        self.shared: dict[int, Any] = {}
        """By identity, what was read by a path outside the module, and all that it reaches."""
        self._tx, self._pattern = tx, pattern_of(source)
        self._codes: dict[str, Any] = {}
        self._modes = torch._C._dynamo.guards.GlobalStateGuard()
        self._inference = torch.is_inference_mode_enabled()
        self._state = self._may_change()
        self._last = next(iter(reversed(tx.output.graph.nodes)), None)

    def _may_change(self) -> Any:
        """What a call may change without a node in the graph."""
        forms = [metadata(node.meta["example_value"]) for node in self.args]
        return forms, changes_of(self._tx)

    def is_current(self) -> bool:
        """Whether torch and Python objects are in the state in which the region began."""
        return bool(
            self._modes.check()
            and torch.is_inference_mode_enabled() is self._inference
            and changes_of(self._tx) == self._state[1]
            and not any(node._erased for node in self.nodes)
        )

    def code(self, expression: str) -> Any:
        """Finds the value of an expression, with the module of another call as `module`."""
        if expression not in self._codes:
            moved = self._pattern.sub("module", expression)
            self._codes[expression] = compile(moved, "<place>", "eval")
        return self._codes[expression]

    def holds(self, source: Any) -> bool:
        """Whether a source is the module's, or of something below it."""
        return self._pattern.search(text(source)) is not None

    def end(self, result: Any) -> str | None:
        """Note what the call has left; the reason if it may not be copied."""
        erased = self._last is not None and self._last._erased
        if erased or not self.is_current() or self._may_change() != self._state:
            return "changes modes, sizes or attributes"
        for node in reversed(self._tx.output.graph.nodes):
            if node is self._last:
                break
            if node.op != "placeholder":
                self.nodes.insert(0, node)
        used = {node for user in self.nodes for node in user.all_input_nodes}
        used -= {*self.nodes, *self.args}
        self.inputs = [node for node in self._tx.output.graph.nodes if node in used]
        self.result = self._nodes_of(result)
        became_variable = {
            (text(source), id(value))
            for source, value, variable in self.reads
            if variable is not None
        }
        below = {
            (text(source), id(value)): (source, value)
            for source, value, _ in self.reads
            if self.holds(source)
        }
        self.reads_below = [(key[0], *read, key in became_variable) for key, read in below.items()]
        return self.obstacle or self._obstacle()

    def _nodes_of(self, result: Any) -> Any:
        """The nodes of a result; None if it has others than tensors of the region."""
        if type(result) is not TupleVariable:
            return self._node_of(result)
        is_none = [_is_none(item) for item in result.items]
        nodes = [self._node_of(item) for item in result.items]
        known = all(none or node for none, node in zip(is_none, nodes, strict=True))
        return (*nodes,) if known else None

    def _node_of(self, result: Any) -> torch.fx.Node | None:
        node = result.as_proxy().node if type(result) is TensorVariable else None
        return node if node in self.args or node in self.nodes else None

    def _obstacle(self) -> str | None:
        """What in the region prevents that it is copied."""
        if self.result is None:
            return "returns more than tensors that it computed"
        for node in self.nodes:
            if (
                node.op not in ("call_function", "call_method")
                or isinstance(node.target, torch._ops.HigherOrderOperator)
                or _switches_mode(node)
                or "unbacked_bindings" in node.meta
            ):
                return f"calls {node.target}"
        for node in self.inputs:
            if node.op != "placeholder":
                return f"uses {node.name}, which is neither an argument nor an input of the model"
        for function in self.functions:
            if not knows_no_module(function):
                return f"{getattr(function, '__qualname__', function)} can reach other modules"
        for kind in self.labels:
            if not only_stores(kind):
                return f"makes a {kind.__qualname__}, which may do more than store its arguments"
        tree = [*self.module.modules()]
        for source, value, variable in self.reads:
            if not self._may_read(source, value, variable, tree):
                return f"reads {text(source)}, which can reach other modules"
        return None

    def _may_read(self, source: Any, value: Any, variable: Any, tree: list[Any]) -> bool:
        """Whether the call of an equal module would have read the same, or its own."""
        first = getattr(variable, "source", None) or source
        if self.holds(source) and self.holds(first):
            return not isinstance(value, torch.nn.Module) or any(value is part for part in tree)
        self.shared[id(value)] = value
        # the content of a container that was read before shows in no read here
        shows = self.holds(source) and not isinstance(value, (*CONTAINERS, torch.nn.Module))
        reached: dict[int, Any] = {}
        may = shows or reaches_only(value, tree, reached)
        self.shared |= reached
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


def form_of(variable: Any, tensors: list[Any]) -> Any:
    """The form of an argument, by which calls are compared; None if it is not supported.

    Tensors that the trace computed are appended to `tensors`.
    """
    if isinstance(variable, LazyVariableTracker):
        if isinstance(variable, LazyConstantVariable) or variable.is_realized():
            variable = variable.realize()
        elif isinstance(variable.original_value(), torch.Tensor):
            return "source", text(variable.source)
    if type(variable) is TensorVariable and variable.source is not None:
        return "source", text(variable.source)
    if type(variable) is TensorVariable:
        nodes = [tensor.as_proxy().node for tensor in tensors]
        node = variable.as_proxy().node
        if node not in nodes:
            tensors.append(variable)
            nodes.append(node)
        return "tensor", nodes.index(node), metadata(node.meta["example_value"])
    if isinstance(variable, ConstantVariable):
        value = variable.as_python_constant()
        return "constant", type(value), repr(value)
    if type(variable) is TupleVariable:
        items = [form_of(item, tensors) for item in variable.items]
        return None if None in items else ("tuple", *items)
    return None


def changes_of(tx: Any) -> list[tuple[Any, str, Any]] | None:
    """The attributes of objects from before the trace that it has changed, with their variables.

    None if it has changed more than attributes of plain objects.
    """
    effects, changes = tx.output.side_effects, []
    for variable in effects.id_to_variable.values():
        written = effects.store_attr_mutations.get(variable)
        if type(variable) is TensorVariable and written is None:
            continue
        existed = "Existing" in type(variable.mutation_type).__name__
        if existed and effects.is_modified(variable):
            if type(variable) is not UserDefinedObjectVariable or written is None:
                return None
            changes += [(variable, name, value) for name, value in written.items()]
    return changes


def metadata(tensor: torch.Tensor) -> Any:
    is_strided = tensor.layout is torch.strided
    return (
        *(type(tensor), tensor.dtype, tensor.device, tensor.layout, tensor.requires_grad),
        *(tensor.is_inference(), str(tensor.shape)),
        (str(tensor.stride()), str(tensor.storage_offset())) if is_strided else None,
    )
