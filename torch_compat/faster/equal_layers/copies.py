"""Add a copy of a region to the graph. Its operators run on fake tensors, as in a trace."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch.fx.node import Node, map_aggregate
from torch.utils._pytree import tree_map

from .match import Match
from .names import Name
from .region import Region, metadata


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
