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

from ...cache.keys.encoder import Undescribable, code_parts
from ...cache.keys.factors import Json
from ...torch_compat.ops import op_name, triton_call
from ..conditions.conditions import Change, changes, number_of_conditions
from ..ir.config import CompileConfig
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
    """Why a bundle must not be stored: the message names each condition and the user's line."""


def provenance(trace: Trace, config: CompileConfig) -> dict[str, Json]:
    """What a bundle of `trace` relies on, for its meta; raises NotCacheable."""
    if trace.conditions.obstacles:
        raise NotCacheable("; ".join(trace.conditions.obstacles))
    try:
        code: dict[str, Json] = {
            kind: {name: {**_DESCRIBE[kind](value)} for name, value in found.items()}
            for kind, found in _code_in_graph(trace, config).items()
        }
    except Undescribable as error:
        raise NotCacheable(str(error)) from error
    return {"conditions": dict(trace.conditions.data), "code": code}


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


def _code_in_graph(trace: Trace, config: CompileConfig) -> dict[str, dict[str, Any]]:
    """Custom ops, kernels and opaque functions of a graph, by kind and name."""
    graph = trace.graph.graph
    splits = is_splitting(graph, config)
    ops = {op_name(node.target): node for node in graph.nodes if is_custom(node.target)}
    return {
        CALLED: {name: node.target for name, node in ops.items() if splits(node)},
        INLINED: {name: node.target for name, node in ops.items() if not splits(node)},
        FUNCTION: dict(_functions(list(graph.nodes))),
    }


def _functions(nodes: list[Node]) -> Iterator[tuple[str, Any]]:
    """Triton kernels and the Python functions that the graph calls, by `module:qualified name`."""
    for node in nodes:
        if launch := triton_call(node):
            function = launch[0]
            while hasattr(function, "fn"):  # an autotuner holds a kernel, which holds a function
                function = function.fn
            yield _name(function, launch[0]), launch[0]
        elif node.op == "call_function" and _is_users(node.target):
            yield _name(node.target, node.target), node.target


def _is_users(target: Any) -> bool:
    package = str(getattr(target, "__module__", None) or "").partition(".")[0]
    return hasattr(target, "__code__") and package not in ("torch", *sys.stdlib_module_names)


def _name(function: Any, value: Any) -> str:
    name = f"{function.__module__}:{function.__qualname__}"
    found = _function(name)
    if found is not value and found is not function:
        raise NotCacheable(f"{name} is called in the graph and cannot be located by its name")
    return name


def _op(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(getattr(torch.ops, namespace), op, None)


def _function(name: str) -> Any:
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    return reduce(lambda value, step: getattr(value, step, None), path.split("."), found)
