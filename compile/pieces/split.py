"""Split a traced graph at splitting ops into sections that run one after the other.

A section is a run of consecutive nodes, so splitting cannot create a cycle or reorder a mutation.
Consecutive splitting ops share a section. Two kinds of nodes without side effects are exceptions:
an element taken from an op's results stays with the op, and an allocation moves to its first use,
or into the section before a splitting op that uses it first, so that it needs no section of its own
and its memory is not held for longer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch.fx import Graph, Node

from ...errors import InvalidSetting, UnknownSplittingOp
from ...torch_compat.basics.ops import overload_of
from ..ir.config import CompileConfig, named_object
from ..ir.ops import ALLOCATIONS, is_registered, op_names

Predicate = Callable[[Node], bool]
SPLITTERS = "piecegraph.splitters"


@dataclass(slots=True)
class Section:
    """Consecutive nodes: either all splitting ops (with their getitems) or none."""

    splitting: bool
    nodes: list[Node] = field(default_factory=list)


def is_splitting(graph: Graph, config: CompileConfig) -> Predicate:
    """Whether to split at a node: by its op's name, by a pattern, or by the user's predicate.

    An engine names the ops of all its models: one that this graph lacks is ignored if it is a
    registered op and another name matches. Raises UnknownSplittingOp for any other name.
    """
    present = [op_names(node) for node in graph.nodes if node.op == "call_function"]
    known = frozenset().union(*present) if present else frozenset()
    wanted = set(known.intersection(config.splitting_ops))
    missing = [name for name in config.splitting_ops if name not in known]
    for pattern in config.splitting_patterns:
        if matched := {name for name in known if fnmatchcase(name, pattern)}:
            wanted |= matched
        else:
            missing.append(pattern)
    for name in missing:
        if not wanted or not is_registered(name):
            custom = sorted(n for n in known if "." not in n and not n.startswith(("aten", "prim")))
            raise UnknownSplittingOp(name=name, known=", ".join(custom) or "none")
    predicate = splitting_predicate(config)
    return lambda node: (
        not wanted.isdisjoint(op_names(node))
        or (predicate is not None and bool(op_names(node)) and predicate(node))
    )


def partition_ops(graph: Graph, splits: Predicate) -> tuple[str, ...]:
    """The ops of the nodes to split at, by Inductor's names for overloads.

    Raises InvalidSetting if only some calls of an op are selected: Inductor partitions at all.
    """
    picked: dict[str, list[bool]] = {}
    for node in graph.nodes:
        if op_names(node):
            picked.setdefault(overload_of(node.target).name(), []).append(bool(splits(node)))
    for name, choices in picked.items():
        if len(set(choices)) > 1:
            raise InvalidSetting(
                name="splitting_predicate",
                value="a function",
                reason=f"it picks {sum(choices)} of {len(choices)} calls of {name}, and Inductor "
                "partitions at every call of an op",
                expected="all calls of an op or none, or use_inductor_graph_partition=False",
            )
    return tuple(sorted(name for name, choices in picked.items() if choices[0]))


def splitting_predicate(config: CompileConfig) -> Predicate | None:
    """The user's predicate; raises InvalidSetting for a name that refers to nothing."""
    given = config.splitting_predicate
    found: Predicate | None = named_object(given, SPLITTERS) if isinstance(given, str) else given
    return found


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
