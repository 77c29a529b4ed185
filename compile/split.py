"""Cut a traced graph at splitting ops into sections that run one after the other.

Order is kept: a section is a run of consecutive nodes, so cutting can neither create a cycle nor
reorder a mutation. Consecutive splitting ops share a section. Two kinds of node are exceptions,
both free of effects: an element taken from a splitting op's result belongs to that op, and a bare
allocation moves up to the earliest compute section that has its inputs, so that no section exists
for it alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from ..errors import UnknownSplittingOp

IsSplitting = Callable[[Node], bool]

ALLOCATIONS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, "new_empty", "new_empty_strided"}
)


@dataclass(slots=True)
class Section:
    """Consecutive nodes: either all splitting ops (with their getitems) or none."""

    splitting: bool
    nodes: list[Node] = field(default_factory=list)


def op_names(node: Node) -> frozenset[str]:
    """The names by which `splitting_ops` may call a node: `ns::op` and `ns::op.overload`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = f"{target.namespace}::{target._schema.name.split('::')[-1]}"
        return frozenset({packet, f"{packet}.{target._overloadname}"})
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
        return frozenset({name, f"{name}.default"})
    return frozenset()


def splitting_by_name(graph: Graph, names: Sequence[str]) -> IsSplitting:
    """Predicate for nodes called one of `names`; raises UnknownSplittingOp for a name unmatched."""
    present = [op_names(node) for node in graph.nodes if node.op == "call_function"]
    known = frozenset().union(*present) if present else frozenset()
    for name in names:
        if name not in known:
            custom = sorted(n for n in known if "." not in n and not n.startswith(("aten", "prim")))
            raise UnknownSplittingOp(name=name, known=", ".join(custom) or "none")
    wanted = frozenset(names)
    return lambda node: not wanted.isdisjoint(op_names(node))


def split(graph: Graph, is_splitting: IsSplitting) -> list[Section]:
    """Sections of `graph` in order of execution; empty ones are left out."""
    sections = [Section(splitting=False)]
    home: dict[Node, int] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        home[node] = _section_for(node, home, sections, is_splitting)
        sections[home[node]].nodes.append(node)
    return [section for section in sections if section.nodes]


def _section_for(
    node: Node, home: dict[Node, int], sections: list[Section], is_splitting: IsSplitting
) -> int:
    inputs = [home[used] for used in node.all_input_nodes if used in home]
    if node.target is operator.getitem and inputs and sections[inputs[0]].splitting:
        return inputs[0]
    if node.target in ALLOCATIONS:
        earliest = max(inputs, default=0)
        compute = [i for i in range(earliest, len(sections)) if not sections[i].splitting]
        if compute:
            return compute[0]
    wanted = is_splitting(node)
    if sections[-1].splitting != wanted:
        sections.append(Section(splitting=wanted))
    return len(sections) - 1
