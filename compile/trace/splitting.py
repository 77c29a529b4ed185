"""Where to split: at ops by name or by pattern, and where the user's predicate says so."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch.fx import Graph, Node

from ...errors import InvalidSetting, UnknownSplittingOp
from ...torch_compat.basics.ops import overload_of
from ..ir.config import CompileConfig, named_object
from ..ir.ops import is_registered, op_names

Predicate = Callable[[Node], bool]
SPLITTERS = "piecegraph.splitters"


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
