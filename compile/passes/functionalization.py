"""Move readers of a tensor's old value before the custom op that mutates it.

In the functional graph such an op returns new tensors. Inductor lets it write into the old ones if
nothing after it reads them, and copies them otherwise. In the program all readers of the old value
come before the op, but Inductor moves them to the uses of their results, which may be after it.
Only functional nodes are moved, so the graph computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ...torch_compat.basics.ops import OpOverload, is_mutable
from ...torch_compat.basics.symbolic import statically_true
from ...torch_compat.basics.tensors import storage_id, tree_leaves

_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


def apply(graph: Graph) -> int:
    """Avoid copies of mutated tensors; returns how many tensors no longer have late readers."""
    rewrites = 0
    for op in graph.find_nodes(op="call_function", target=_FUNCTIONALIZED):
        for base in op.kwargs["_all_bases"]:
            moved = _to_move(graph, op, base)
            for node in moved:
                op.prepend(node)
            rewrites += bool(moved)
    return rewrites


def _to_move(graph: Graph, op: Node, base: Node) -> list[Node]:
    """The nodes after `op`, in order, that must move so that nothing there reads the old `base`.

    Empty if there are none, if one cannot be moved, or if their results are larger than a copy of
    `base`.
    """
    old = _aliases(graph, base)
    nodes = list(graph.nodes)
    after = nodes[nodes.index(op) + 1 :]
    late = {node for node in after if _reads(node, old)}
    movable = _movable(op, after)
    while late and late <= movable:
        late |= _needed(late, movable)
        kept = [node for node in late if any(user not in late for user in node.users)]
        if statically_true(sum(map(_bytes, kept)) <= _bytes(base)):
            return [node for node in after if node in late]
        more = {user for node in kept for user in node.users if user in movable} - late
        if not more:
            break
        late |= more
    return []


def _aliases(graph: Graph, base: Node) -> set[Node]:
    """`base` and all values that share its memory."""
    memory = _memory(base)
    return {node for node in graph.nodes if node is base or _memory(node) == memory is not None}


def _memory(node: Node) -> int | None:
    value = node.meta.get("val")
    if isinstance(value, Tensor) and value.layout is torch.strided:
        return storage_id(value)
    return None


def _reads(node: Node, old: set[Node]) -> bool:
    """Whether `node` reads a value of `old`; copying a new value into one is not a read."""
    if node.target is torch.ops.aten.copy_.default and node.args[0] in old:
        return node.args[1] in old
    return node in old or any(given in old for given in node.all_input_nodes)


def _movable(op: Node, after: list[Node]) -> set[Node]:
    """Functional nodes, independent of `op`, before the first node that may write."""
    stay, movable = {op}, set()
    for node in after:
        if _may_write(node):
            break
        if _is_functional(node) and stay.isdisjoint(node.all_input_nodes):
            movable.add(node)
        else:
            stay.add(node)
    return movable


def _may_write(node: Node) -> bool:
    if isinstance(node.target, OpOverload):
        return is_mutable(node.target)
    known = node.target is _FUNCTIONALIZED or _is_builtin(node) or node.op == "get_attr"
    return not known


def _is_functional(node: Node) -> bool:
    """Whether the result depends only on the arguments and there are no side effects."""
    if not isinstance(node.target, OpOverload):
        return _is_builtin(node)
    ordered = torch.Tag.nondeterministic_seeded in node.target.tags
    collective = node.target.namespace.startswith("_c10d")
    return not (ordered or collective or node.is_impure())


def _is_builtin(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__module__", "") == "_operator"


def _needed(late: set[Node], movable: set[Node]) -> set[Node]:
    """The nodes of `movable` from which the nodes `late` are computed."""
    needed: set[Node] = set()
    pending = list(late)
    while pending:
        new = movable.intersection(pending.pop().all_input_nodes) - needed
        needed |= new
        pending += new
    return needed


def _bytes(node: Node) -> Any:
    """Size of the value in bytes; an expression if sizes are symbolic."""
    tensors = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
