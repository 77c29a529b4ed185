"""The calls of modules in one trace, of which some are copied."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch.fx.node import Node, map_aggregate
from torch.utils._pytree import tree_map

from .match import Match
from .names import Name, Names, text
from .region import Region, changes_of, form_of, metadata

_FEWEST_MODULES = 3
"""How many modules of one class a model has whose calls are compared."""
_MOST_REGIONS = 4
"""How many calls of equal form are kept for comparison."""


class Calls:
    """The calls of modules in one trace."""

    def __init__(self, model: torch.nn.Module) -> None:
        classes = Counter(map(type, model.modules()))
        self._classes = {
            kind
            for kind, count in classes.items()
            if count >= _FEWEST_MODULES and not kind.__module__.startswith("torch.")
        }
        self.failures: dict[str, str] = {}
        """By module, an error of ours: its call was traced."""
        self._output: Any = None
        self._start()

    def _start(self) -> None:
        self.region: Region | None = None
        """The call that is traced now."""
        self.places: list[tuple[str, str]] = []
        """Expressions of a module that was traced and of one whose call copied its region."""
        self.reasons: dict[str, str] = {}
        """By class, why the last call that could be compared was traced, unless it was copied."""
        self.names = Names()
        self._reads: dict[int, list[Any]] = {}
        """By identity, the sources by which the trace has read an object."""
        self._objects: list[Any] = []
        """Keeps what was read alive: an identity is that of one object."""
        self._regions: dict[Any, list[Region | None]] = {}

    def begin(self, output: Any) -> None:
        """Forget what belongs to another graph: Dynamo may start a trace over."""
        if output is not self._output:
            self._output = output
            self._start()

    def read(self, source: Any, value: Any, variable: Any) -> None:
        """Note what the trace has read, and the variable that it became, if any."""
        self._reads.setdefault(id(value), []).append(source)
        self._objects.append(value)
        if self.region:
            self.region.reads.append((source, value, variable))

    def call(
        self,
        trace: Callable[..., Any],
        variable: Any,
        tx: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The result of calling a module: of a copied region, else of `trace`, Dynamo's."""
        self.begin(tx.output)
        module, kind, effects = variable.value, type(variable.value), tx.output.side_effects
        if self.region or kind not in self._classes or not _is_plain(variable, tx):
            return trace(tx, args, kwargs)
        tensors: list[Any] = []
        forms = [form_of(arg, tensors) for arg in (*args, *kwargs.values())]
        if None in forms or any(map(effects.has_pending_mutation, tensors)):
            return trace(tx, args, kwargs)
        regions = self._regions.setdefault((kind, (*forms,), (*kwargs,), len(args)), [])
        for region in filter(None, regions):
            match = Match(region, module, variable.source, tx, self.names, self._reads)
            difference = self._checked(match.source, match.difference)
            if difference is None:
                self.reasons.pop(kind.__qualname__, None)
                self.places.append((region.name, text(match.source)))
                return copy_region(region, match, tensors, tx)
            self.reasons[kind.__qualname__] = f"not as {region.name}: {difference}"
        if len(regions) == _MOST_REGIONS:
            return trace(tx, args, kwargs)
        self.region = region = Region(module, variable.source, tensors, tx)
        try:
            result = trace(tx, args, kwargs)
        finally:
            self.region = None
        obstacle = self._checked(region.source, lambda: _end(region, result, variable, tx))
        if obstacle is not None:
            self.reasons[kind.__qualname__] = f"{region.name} {obstacle}"
        regions.append(region if obstacle is None else None)
        return result

    def _checked(self, source: Any, check: Callable[[], str | None]) -> str | None:
        """The result of a check. If it fails, which is an error of ours, the error."""
        try:
            return check()
        except Exception as error:
            self.failures[text(source)] = f"{type(error).__name__}: {error}"
            return self.failures[text(source)]


def _end(region: Region, result: Any, variable: Any, tx: Any) -> str | None:
    if not _is_plain(variable, tx):
        return "changes modes or objects"
    return region.end(result)


def _is_plain(variable: Any, tx: Any) -> bool:
    """Whether a call has a place of its own, in a trace that changes nothing but attributes."""
    return bool(
        variable.source is not None
        and len(tx.output.tracers) == 1
        and not tx.output.export
        and not tx.symbolic_torch_function_state.mode_stack
        and changes_of(tx) is not None
    )


def copy_region(region: Region, match: Match, args: list[Any], tx: Any) -> Any:
    """Add the nodes of a region to the graph as Dynamo does; returns the result of the call."""
    graph, tracer = tx.output.graph, tx.output.current_tracer
    variables = dict(zip(region.args, args, strict=True))
    copies = {node: variable.as_proxy().node for node, variable in variables.items()}
    for node in region.inputs:
        copies[node] = _input(match.inputs.get(node), node, tx)
    for source, value in match.shared:
        VariableBuilder(tx, source)(value)  # adds the guard that both are one object

    def argument(value: Any) -> Any:
        if type(value) is Name:
            return match.name_for(value)
        return copies[value] if isinstance(value, Node) else value

    results = region.result if isinstance(region.result, tuple) else (region.result,)
    for node in region.nodes:
        arguments, kwargs = map_aggregate((node.args, node.kwargs), argument)
        copy = graph.create_node(node.op, node.target, arguments, kwargs, node.name, node.type)
        copy.meta = {key: node.meta[key] for key in node.meta if key != "example_value"}
        copies[node] = copy
        value = get_fake_value(copy, tx, allow_non_graph_fake=True)
        if node in results:
            proxy = torch.fx.Proxy(copy, tracer)
            variables[node] = handle_traced_output(value, tx, proxy, {}, None, TensorVariable)
            tracer.record_proxyable_vt(variables[node])
        elif value is not None:
            set_example_value(copy, value)
    if any(form_of_node(node) != form_of_node(copies[node]) for node in region.nodes):
        raise RuntimeError("an operator has results of another form for another name")
    none = ConstantVariable.create(None)
    items = [none if node is None else variables[node] for node in results]
    return TupleVariable(items) if isinstance(region.result, tuple) else items[0]


def _input(parts: tuple[Any, ...] | None, node: Node, tx: Any) -> Node:
    """The placeholder that stands for an input of a region: of its own for a weight or a label."""
    if parts is None:
        return node
    if len(parts) == 3:
        return tx.output.synthetic_graph_input(*parts).as_proxy().node  # type: ignore[no-any-return]
    source, value = parts
    return VariableBuilder(tx, source)(value).as_proxy().node  # type: ignore[no-any-return]


def form_of_node(node: Node) -> Any:
    """What is compared of the results of two nodes."""
    return tree_map(
        lambda value: metadata(value) if isinstance(value, torch.Tensor) else repr(value),
        node.meta.get("example_value"),
    )
