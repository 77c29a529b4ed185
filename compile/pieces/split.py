"""Split a traced graph at splitting ops into sections that run one after the other.

A section is a run of consecutive nodes, so splitting cannot create a cycle or reorder a mutation.
Consecutive splitting ops share a section. Two kinds of nodes without side effects are exceptions:
an element taken from an op's results stays with the op, and an allocation moves to its first use,
or into the section before a splitting op that uses it first, so that it needs no section of its own
and its memory is not held for longer.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from ..ir.ops import ALLOCATIONS
from ..trace.splitting import Predicate


@dataclass(slots=True)
class Section:
    """Consecutive nodes: either all splitting ops (with their getitems) or none."""

    splitting: bool
    nodes: list[Node] = field(default_factory=list)


def split(graph: Graph, splits: Predicate, is_size: Predicate) -> list[Section]:
    """The non-empty sections of `graph` in order of execution.

    Sizes are in no section: each piece and call computes the sizes it needs from the symbols.
    """
    sections = [Section(splitting=False)]
    home: dict[Node, int] = {}

    def place(node: Node, index: int) -> None:
        home[node] = index
        sections[index].nodes.append(node)

    def place_allocations(user: Node, wanted: bool) -> None:
        for used in user.all_input_nodes:
            if used.target in ALLOCATIONS and used not in home:
                place_allocations(used, wanted)
                place(used, _section_of_allocation(used, home, sections, wanted))

    for node in graph.nodes:
        if node.op == "placeholder" or node.target in ALLOCATIONS or is_size(node):
            continue
        wanted = splits(node)
        place_allocations(node, wanted)
        if node.op != "output":
            place(node, _section_for(node, home, sections, wanted))
    return [section for section in sections if section.nodes]


def _section_for(node: Node, home: dict[Node, int], sections: list[Section], wanted: bool) -> int:
    inputs = [home[used] for used in node.all_input_nodes if used in home]
    if takes_element(node) and inputs:
        return inputs[0]
    return _last(sections, wanted)


def _section_of_allocation(
    node: Node, home: dict[Node, int], sections: list[Section], before_splitting_op: bool
) -> int:
    if before_splitting_op:
        earliest = max((home[used] for used in node.all_input_nodes if used in home), default=0)
        compute = [i for i in range(earliest, len(sections)) if not sections[i].splitting]
        if compute:
            return compute[-1]
    return _last(sections, splitting=False)


def _last(sections: list[Section], splitting: bool) -> int:
    """The last section, or a new one if that is of the other kind."""
    if sections[-1].splitting != splitting:
        sections.append(Section(splitting))
    return len(sections) - 1


def takes_element(node: Node) -> bool:
    """Whether a node takes one of several results of an op, unlike `tensor[0]`."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, Node) and isinstance(source.meta.get("example_value"), (tuple, list))
