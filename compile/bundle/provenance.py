"""What a bundle relies on: recorded when it is stored, checked before it is used.

The trace key finds candidates. A candidate is used if all its conditions hold in this process: the
values and the code that the trace relied on, and the custom ops, Triton kernels and opaque
functions in its graph. Of a splitting op, which is called and not compiled, only the schema and the
fake implementation count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...cache.keys.code import code_parts
from ...cache.keys.encoder import KNOWN, Undescribable
from ...cache.keys.factors import Json
from ...torch_compat.basics.ops import op_name, triton_call
from ..conditions.conditions import Change, changes, number_of_conditions
from ..ir.config import CompileConfig
from ..ir.locations import node_location
from ..ir.ops import is_custom
from ..pieces.fingerprint import op_parts, op_signature
from ..pieces.split import is_splitting

if TYPE_CHECKING:
    from ..trace.dynamo import Trace

CALLED, INLINED, FUNCTION = "called op", "op", "function"
_DESCRIBE: dict[str, Callable[[Any], dict[str, str]]] = {
    CALLED: lambda op: op_signature(op),
    INLINED: lambda op: op_parts(op),
    FUNCTION: lambda function: code_parts(function),
}


class NotCacheable(Exception):
    """Why a bundle must not be stored: `args` name each condition and the user's line."""


def provenance(trace: Trace, config: CompileConfig) -> dict[str, Json]:
    """What a bundle of `trace` relies on, for its meta; raises NotCacheable."""
    code: dict[str, dict[str, Json]] = {CALLED: {}, INLINED: {}, FUNCTION: {}}
    obstacles = list(trace.conditions.obstacles)
    for kind, name, value, node in _code_in_graph(trace, config):
        try:
            found = _function(name) if kind == FUNCTION else value
            if found is not value and found is not _innermost(value):
                raise Undescribable("", "cannot be located by its name")
            if name not in code[kind]:
                code[kind][name] = {**_DESCRIBE[kind](value)}
        except Undescribable as error:
            obstacles.append(f"{kind} {name}{error.where} {error.reason} ({node_location(node)})")
    if obstacles:
        raise NotCacheable(*dict.fromkeys(obstacles))
    return {"conditions": dict(trace.conditions.data), "code": dict(code)}


def differences(meta: Mapping[str, Any], model: torch.nn.Module) -> list[Change]:
    """The conditions in the meta of a bundle that do not hold; empty if it may be used."""
    try:
        return [*changes(meta["conditions"], model), *_changed_code(meta["code"])]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        return [Change("conditions", "recorded", f"unreadable ({type(error).__name__}: {error})")]


def num_conditions(meta: Mapping[str, Any]) -> int:
    """How many conditions the meta of a bundle holds."""
    return number_of_conditions(meta["conditions"]) + sum(map(len, meta["code"].values()))


def _changed_code(recorded: Mapping[str, Mapping[str, Mapping[str, str]]]) -> Iterator[Change]:
    for kind, named in recorded.items():
        for name, old in named.items():
            found = _op(name) if kind in (CALLED, INLINED) else _function(name)
            try:
                new = {} if found is None else _DESCRIBE[kind](found)
            except Undescribable as error:
                new = {"": f"undescribable: {error}"}
            if dict(old) != new:
                yield from _different_parts(f"{kind} {name}", old, new)


def _different_parts(what: str, old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[Change]:
    for part in sorted({*old, *new}):
        before, after = old.get(part, "missing"), new.get(part, "missing")
        if before != after:
            yield Change(f"{what}{part}", before, after)


def _code_in_graph(trace: Trace, config: CompileConfig) -> Iterator[tuple[str, str, Any, Node]]:
    """Custom ops, Triton kernels and Python functions of a graph: kind, name, value and node."""
    graph = trace.graph.graph
    splits = is_splitting(graph, config)
    for node in graph.nodes:
        if is_custom(node.target):
            yield CALLED if splits(node) else INLINED, op_name(node.target), node.target, node
        elif launch := triton_call(node):
            yield FUNCTION, _name(_innermost(launch[0])), launch[0], node
        elif node.op == "call_function" and _is_users(node.target):
            yield FUNCTION, _name(node.target), node.target, node


def _innermost(kernel: Any) -> Any:
    """The function of a Triton kernel: an autotuner holds a kernel, which holds a function."""
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return kernel


def _is_users(target: Any) -> bool:
    home = getattr(target, "__globals__", {}).get("__name__") or getattr(target, "__module__", "")
    return hasattr(target, "__code__") and str(home).partition(".")[0] not in KNOWN


def _name(function: Any) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _op(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op, None)


def _function(name: str) -> Any:
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    return reduce(lambda value, step: getattr(value, step, None), path.split("."), found)
