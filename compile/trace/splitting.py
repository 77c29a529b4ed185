"""Where to split: at ops by name or by pattern, and where a function of the user says so."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch.fx import Graph, Node

from ...errors import UnknownSplittingOp
from ..ir.config import CompileConfig
from ..ir.ops import is_registered, op_names

Predicate = Callable[[Node], bool]


def is_splitting(graph: Graph, config: CompileConfig) -> Predicate:
    """Whether to split at a node: by its op's name, by a pattern of names, or by a function.

    An engine names the ops of all its models: one that this graph lacks is ignored if it is a
    registered op and another name matches. Raises UnknownSplittingOp for any other name.
    """
    present = [op_names(node) for node in graph.nodes if node.op == "call_function"]
    names = frozenset().union(*present) if present else frozenset()
    matched = {rule: {n for n in names if fnmatchcase(n, rule)} for rule in config.splitting_ops}
    wanted = set().union(*matched.values())
    for rule in config.splitting_ops:
        if not matched[rule] and (not wanted or not is_registered(rule)):
            custom = sorted(n for n in names if "." not in n and not n.startswith(("aten", "prim")))
            raise UnknownSplittingOp(name=rule, known=", ".join(custom) or "none")
    functions = config.splitting_functions
    return lambda node: (
        not wanted.isdisjoint(op_names(node))
        or (bool(op_names(node)) and any(function(node) for function in functions))
    )
