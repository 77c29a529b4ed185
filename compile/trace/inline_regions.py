"""Put regions and values that Dynamo made inputs of the graph back in line.

Under `torch.compiler.nested_compile_region` equal layers are traced once and the graph holds calls
of one subgraph. A splitting op may be inside, so each call is replaced by the nodes of the region.
Equal pieces are found again by content, so nothing is compiled twice for it.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from ...torch_compat.basics.tensors import opaque_value


def inline_regions(graph: GraphModule) -> int:
    """Replace every call of a region in `graph`; returns how many there were."""
    calls = graph.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.invoke_subgraph
    )
    for call in calls:
        reference = call.args[0]
        assert isinstance(reference, Node)
        region = graph.get_submodule(str(reference.target))
        assert isinstance(region, GraphModule)
        inline_regions(region)
        _replace(call, _copied(graph, region, call))
        graph.graph.erase_node(call)
        if not reference.users:
            graph.graph.erase_node(reference)
    return len(calls)


def inline_opaque_values(graph: GraphModule) -> None:
    """Replace inputs that are values of an opaque type, such as names of layers, by the values.

    Dynamo makes an input of a value whose type was registered with `hoist=True`. In the arguments
    of a splitting call it is in no piece, so equal layers stay equal.
    """
    for node in graph.graph.find_nodes(op="placeholder"):
        value = opaque_value(node.meta["example_value"])
        if value is not None:
            for user in list(node.users):
                known: dict[Node, Any] = {each: each for each in user.all_input_nodes}
                known[node] = value
                user.args, user.kwargs = map_arg((user.args, user.kwargs), known.__getitem__)
            graph.graph.erase_node(node)


def _copied(graph: GraphModule, region: GraphModule, call: Node) -> Any:
    """Copy the region's nodes before `call`, and return its results in terms of the copies."""
    parameters = region.graph.find_nodes(op="placeholder")
    values: dict[Node, Any] = dict(zip(parameters, call.args[2:], strict=True))
    with graph.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op == "get_attr":
                _share(graph, region, str(node.target))
            if node.op not in ("placeholder", "output"):
                values[node] = graph.graph.node_copy(node, values.__getitem__)
    return map_arg(region.graph.output_node().args[0], values.__getitem__)


def _share(graph: GraphModule, region: GraphModule, name: str) -> None:
    """Let the outer graph have a constant of the region under the same name."""
    constant = getattr(region, name)
    assert getattr(graph, name, constant) is constant
    setattr(graph, name, constant)


def _replace(call: Node, results: Any) -> None:
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])
        user.graph.erase_node(user)
