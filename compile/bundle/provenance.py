"""What a bundle was traced from, recorded with it, and whether all of that is still so.

The trace key is made before the trace; this is what only the trace can tell: the sources of every
function that was inlined, the values outside the model that were baked in, and the custom ops and
Triton kernels of the graph. Of a splitting op, which is called and not compiled, only the schema
and the fake implementation count.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Node

from ...cache.keys.code_fingerprint import fingerprint
from ...cache.keys.factors import Json
from ...torch_compat.ops import op_name, triton_call
from ..ir.config import CompileConfig
from ..ir.ops import is_custom
from ..pieces.fingerprint import op_form, op_source
from ..pieces.split import is_splitting
from ..trace.external_state import changed_read
from .key_factors import source_digest

if TYPE_CHECKING:
    from ..trace.dynamo import Trace


def provenance(trace: Trace, config: CompileConfig) -> dict[str, Json]:
    """Plain data for the meta of a bundle."""
    graph = trace.graph.graph
    splits = is_splitting(graph, config)
    called = {op_name(node.target): node for node in graph.nodes if is_custom(node.target)}
    kernels = dict(_kernels(list(graph.nodes)))
    modules = {*trace.modules, *(name.partition(":")[0] for name in kernels)}
    return {
        "sources": {name: source_digest(name) for name in sorted(modules)},
        "reads": trace.reads,
        "splitting_ops": {n: op_form(v.target) for n, v in called.items() if splits(v)},
        "ops": {n: op_source(v.target) for n, v in called.items() if not splits(v)},
        "kernels": {name: fingerprint(kernel) for name, kernel in kernels.items()},
    }


def changed_since(meta: Mapping[str, Any], model: torch.nn.Module) -> str | None:
    """What has changed since the provenance in `meta` was recorded, in words; None if nothing."""
    try:
        return next(_changes(meta, model), None)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return f"it does not say what it was traced from ({type(error).__name__}: {error})"


def _changes(meta: Mapping[str, Any], model: torch.nn.Module) -> Iterator[str]:
    for module, digest in meta["sources"].items():
        if source_digest(module) != digest:
            yield f"the source of {module} has changed"
    if change := changed_read(meta["reads"], model):
        yield change
    for name, form in meta["splitting_ops"].items():
        if _stated(name, op_form) != form:
            yield f"op {name} has another schema or fake implementation"
    for name, source in meta["ops"].items():
        if _stated(name, op_source) != source:
            yield f"op {name} has another implementation"
    for name, digest in meta["kernels"].items():
        if (kernel := _object(name)) is not None and fingerprint(kernel) != digest:
            yield f"Triton kernel {name} has changed"


def _stated(name: str, describe: Any) -> str | None:
    namespace, _, op = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), op, None)
    return None if packet is None else str(describe(packet))


def _kernels(nodes: list[Node]) -> Iterator[tuple[str, Any]]:
    """Triton kernels by `module:qualified name`."""
    for node in nodes:
        if launch := triton_call(node):
            function = launch[0]
            while hasattr(function, "fn"):  # an autotuner holds a kernel, which holds a function
                function = function.fn
            yield f"{function.__module__}:{function.__qualname__}", launch[0]


def _object(name: str) -> Any:
    module, _, path = name.partition(":")
    found = sys.modules.get(module)
    return reduce(lambda value, step: getattr(value, step, None), path.split("."), found)
