"""Context managers around splitting ops, resolved before the graph is split.

A step runs without gradients, so inference_mode, no_grad and enable_grad are removed. An autocast
region with splitting ops inside becomes one region for each compute section; a splitting op inside
it is called under autocast by the step function. Any other context that a splitting op would cut
in two is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Graph, Node

from ...errors import ContextSplit, NotPartitioned
from ...torch_compat.basics.ops import is_op, overload_of
from ...torch_compat.tracing.dynamo import enter_autocast, exit_autocast, is_gradient_switch
from ..ir.locations import node_location
from ..ir.ops import ALLOCATIONS
from ..trace.splitting import Predicate
from ..trace.symbols import is_number
from .split import takes_element

AUTOCAST = "autocast"
"""Key in a node's meta: the arguments of the innermost autocast around a splitting op."""


def resolve_contexts(graph: Graph, splits: Predicate) -> None:
    """Remove gradient switches, and give each compute section its own autocast region."""
    for node in reversed(list(graph.nodes)):
        if is_gradient_switch(node.target):
            graph.erase_node(node)
    for leave in list(graph.find_nodes(op="call_function", target=exit_autocast)):
        _divide(graph, leave, splits)  # inner regions end before outer ones


def partition_ops(graph: Graph, splits: Predicate) -> tuple[str, ...]:
    """The overloads at whose calls Inductor partitions the code of a whole graph.

    Raises NotPartitioned for an op that is split at in some of its calls only, or called under
    autocast, which the generated code does not enter.
    """
    chosen: dict[str, set[bool]] = {}
    for node in graph.nodes:
        if is_op(node.target):
            name = overload_of(node).name()
            chosen.setdefault(name, set()).add(bool(splits(node)))
            if AUTOCAST in node.meta:
                raise NotPartitioned(
                    where=node_location(node), reason=f"{name} is called under autocast"
                )
    for name, choices in chosen.items():
        if len(choices) > 1:
            raise NotPartitioned(reason=f"splitting_ops selects some calls of {name} only")
    return tuple(sorted(name for name, (splitting,) in chosen.items() if splitting))


def check_contexts(outputs: Sequence[Node]) -> None:
    """Raise ContextSplit if a section passes on a value that is no tensor or size."""
    for node in outputs:
        if node.op == "call_function" and node.meta.get("example_value") is None:
            name = getattr(node.target, "__name__", str(node.target))
            raise ContextSplit(where=node_location(node), name=name)


def _divide(graph: Graph, leave: Node, splits: Predicate) -> None:
    enter = leave.args[0]
    assert isinstance(enter, Node)
    nodes = list(graph.nodes)
    inside = nodes[nodes.index(enter) + 1 : nodes.index(leave)]
    if not any(map(splits, inside)):
        return
    run: list[Node] = []
    for node in [*inside, leave]:
        if node is not leave and not splits(node):
            run.append(node)
            continue
        if splits(node):
            node.meta.setdefault(AUTOCAST, list(enter.args))
        computed = [each for each in run if _computes(each)]
        if computed:
            with graph.inserting_before(computed[0]):
                begin = graph.call_function(enter_autocast, enter.args)
            with graph.inserting_after(computed[-1]):
                end = graph.call_function(exit_autocast, (begin,))
            begin.meta.update(enter.meta)
            end.meta.update(leave.meta)
        run = []
    graph.erase_node(leave)
    graph.erase_node(enter)


def _computes(node: Node) -> bool:
    """Whether autocast can matter to a node: not to sizes, allocations, elements of results."""
    return not (is_number(node) or node.target in ALLOCATIONS or takes_element(node))
