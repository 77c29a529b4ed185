"""Where to split: at ops by name or by pattern, and where a function of the user says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from functools import cache

from torch.fx import Graph, Node

from ...errors import UnknownSplittingOp
from ..ir.config import CompileConfig
from ..ir.ops import is_registered, op_names

Predicate = Callable[[Node], bool]


def is_splitting(config: CompileConfig) -> Predicate:
    """Whether to split at a node: by its op's name, by a pattern of names, or by a function."""
    rules, functions = config.splitting_ops, config.splitting_functions

    @cache
    def is_named(names: frozenset[str]) -> bool:
        return any(fnmatchcase(name, rule) for name in names for rule in rules)

    def splits(node: Node) -> bool:
        names = op_names(node)
        return bool(names) and (is_named(names) or any(function(node) for function in functions))

    return splits


def check_splitting_ops(graphs: Iterable[Graph], config: CompileConfig) -> None:
    """Raise UnknownSplittingOp for a name or pattern that fits no op of a model's graphs.

    An engine names the ops of all its models: one that this model lacks is ignored if it is a
    registered op and another name matches.
    """
    names = {name for graph in graphs for node in graph.nodes for name in op_names(node)}
    matched = {rule: any(fnmatchcase(n, rule) for n in names) for rule in config.splitting_ops}
    for rule, matches in matched.items():
        if not matches and not (any(matched.values()) and is_registered(rule)):
            custom = sorted(n for n in names if "." not in n and not n.startswith(("aten", "prim")))
            raise UnknownSplittingOp(name=rule, known=", ".join(custom) or "none")
