"""`torch.compile(model, backend="piecegraph")`: our split, unique pieces and cache in any program.

Dynamo traces and guards as for every backend, in each process: there are no bundles, no graphs, no
dispatch and no `seal`. `options` are settings of `Config` that concern compiling, by dotted name.
A graph that cannot be served here is compiled by torch's own backend: a program that runs with
Inductor runs with this backend too.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from operator import attrgetter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..compile.conditions.conditions import Conditions
from ..compile.conditions.places import Place
from ..compile.guards.prover import GuardProver
from ..compile.guards.trace_with_guards import GuardedTrace
from ..compile.ir.compilation import CompileRequest
from ..compile.ir.config import TOKENS, DynamicShapes, GuardPolicy
from ..compile.ir.locations import first_line, node_location
from ..compile.ir.ops import op_names
from ..compile.ir.plan import NUMBER
from ..compile.ir.serialization import Ref
from ..compile.pipeline import compile_trace
from ..compile.trace.dynamo import Trace
from ..compile.trace.examples import Examples, Leaf
from ..compile.trace.inline_regions import inline_regions
from ..compile.trace.mutations import dense_tensors, written_storages
from ..compile.trace.size_asserts import keep_value_asserts
from ..compile.trace.symbols import argument_sizes, symbol_labels
from ..config import Config, compile_config
from ..errors import GradientsNeeded, InvalidSetting
from ..events import Events
from ..torch_compat.basics.symbolic import size_range
from ..torch_compat.basics.tensors import storage_id
from ..torch_compat.tracing.dynamo import current_shape_env, registered_backend, registered_backends
from .setup.open_cache import open_cache
from .setup.switches import resolve_config

OPTIONS = (
    "splitting_ops", "compiler", "codegen.inductor_options", "codegen.passes", "codegen.dump_dir",
    "cache", "cache_dir",
)  # fmt: skip
"""The settings of `Config` that `torch.compile(options=...)` may have."""


def backend(
    graph: GraphModule, inputs: list[Any], options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one graph of Dynamo. Also `options["events"]`: an `Events` to report to.

    A splitting op that a graph does not contain is ignored, since a program can have many graphs.
    A graph that fails here, for whatever reason, goes to torch's backend of the same name as the
    compiler, with one warning that says why and how many did so far. So does one that fails in a
    call and not with torch's, unless it writes to its inputs, which must not happen twice. With
    `options["strict"]` the error is raised instead: GradientsNeeded for a graph whose gradients are
    needed, and the errors of compiling. Raises InvalidSetting.
    """
    settings = dict(options or {})
    events = settings.pop("events", None) or Events()
    strict = settings.pop("strict", False)
    if unknown := [name for name in settings if name not in OPTIONS]:
        raise InvalidSetting(
            name="options",
            value=unknown[0],
            reason="torch.compile(backend='piecegraph') has no such option",
            expected="among events, strict, " + ", ".join(OPTIONS),
        )
    config = resolve_config(Config().changed(**settings))
    # our passes change the graph; torch's backend must be given the one that Dynamo made
    copied = GraphModule(graph, copy.deepcopy(graph.graph))
    try:
        step, writes = _compiled(copied, inputs, config, events)
    except Exception as error:
        if strict:
            raise
        _warn(error, graph, config.compiler, events)
        return _by_torch(graph, inputs, config)
    events.count("backend.graphs")
    return step if strict or writes else _guarded(step, graph, config, events)


_CAUSES = "backend.fallbacks."


def backend_report(events: Events) -> dict[str, Any]:
    """What became of the graphs of programs that were compiled with `options={"events": events}`.

    `graphs` are ours, `fallbacks` went to torch's backend, and `causes` has the number of these by
    the name of the error: `{"graphs": 5, "fallbacks": 1, "causes": {"GradientsNeeded": 1}}`.
    """
    counted = events.counters
    causes = {k.removeprefix(_CAUSES): n for k, n in counted.items() if k.startswith(_CAUSES)}
    graphs, fallbacks = counted["backend.graphs"], counted["backend.fallbacks"]
    return {"graphs": graphs, "fallbacks": fallbacks, "causes": causes}


def _guarded(
    step: Callable[..., Any], graph: GraphModule, config: Config, events: Events
) -> Callable[..., Any]:
    """`step`, or the graph by torch's backend once a call of `step` has failed alone."""
    current = step

    def run(*args: Any) -> Any:
        nonlocal current
        try:
            return current(*args)
        except Exception as error:
            if current is not step:
                raise
            by_torch = torch.compile(graph, backend=_torch_name(config))
            results = by_torch(*args)  # raises what is wrong with the program or its arguments
            _warn(error, graph, config.compiler, events)
            current = by_torch
            return results

    return run


def _warn(error: Exception, graph: GraphModule, compiler: str, events: Events) -> None:
    reason = f"{type(error).__name__}: {first_line(error)}"
    where = next(filter(None, map(node_location, graph.graph.nodes)), None)
    events.count("backend.fallbacks")
    events.count(f"{_CAUSES}{type(error).__name__}")
    events.emit(
        "backend.fallback",
        level=logging.WARNING,
        where=where,
        compiler=compiler,
        reason=reason,
        fallbacks=events.counters["backend.fallbacks"],
    )


def _by_torch(graph: GraphModule, inputs: list[Any], config: Config) -> Callable[..., Any]:
    """The graph as torch compiles it alone, with a backward pass where gradients are needed."""
    name = _torch_name(config)
    patches = dict(config.codegen.inductor_options)
    options = {"config_patches": patches} if name == "inductor" and patches else {}
    compiled: Callable[..., Any] = registered_backend(name)(graph, inputs, **options)
    return compiled


def _torch_name(config: Config) -> str:
    return config.compiler if config.compiler in registered_backends() else "inductor"


def _compiled(
    graph: GraphModule, inputs: list[Any], config: Config, events: Events
) -> tuple[Callable[..., Any], bool]:
    """The graph as pieces, and whether it writes to what it is given. Raises GradientsNeeded and
    the errors of compiling."""
    tensors = _tensors_as_inputs(graph)
    if torch.is_grad_enabled() and any(map(_needs_gradient, [*inputs, *tensors])):
        raise GradientsNeeded()
    keep_value_asserts(graph)
    inline_regions(graph)
    names = [name for node in graph.graph.nodes for name in op_names(node)]
    trace = _adopted(graph)
    labels = symbol_labels(trace)
    limits = {label: size_range(trace.shape_env, symbol) for symbol, label in labels.items()}
    compiling = compile_config(config)
    low, high = limits.pop(TOKENS, (compiling.min_num_tokens, compiling.max_num_tokens))
    compiling = replace(
        compiling,
        min_num_tokens=low,
        max_num_tokens=high,
        symbol_limits=limits,
        splitting_ops=_present(compiling.splitting_ops, names),
        # Dynamo guards what is not proved; an artifact with such a guard is not stored
        guards=GuardPolicy.CHECK,
        code=replace(compiling.code, dynamic_shapes=DynamicShapes.BACKED),
    )
    guards = GuardProver(trace.shape_env, labels, compiling, events)
    guards.prove_new("dynamo")
    device = next((v.device for v in inputs if isinstance(v, torch.Tensor)), torch.device("cpu"))
    cache, folder = open_cache(config, events), config.codegen.dump_dir
    request = CompileRequest(graph, compiling, cache, events, device, dump_dir=folder)
    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    writes = bool(written_storages(graph.graph, {*map(storage_id, dense_tensors(examples))}))
    compiled = compile_trace(request, GuardedTrace(trace, guards, compiling))
    step = compiled.link()

    def run(*args: Any) -> tuple[Any, ...]:
        return step(*args, *tensors)

    return run, writes


def _tensors_as_inputs(graph: GraphModule) -> list[torch.Tensor]:
    """Make the tensors that Dynamo's graph holds, such as an optimizer's state, its last inputs.

    They may be written, and a piece would hold them by value. Returns them in order.
    """
    tensors: list[torch.Tensor] = []
    first = next(n for n in graph.graph.nodes if n.op not in ("placeholder", "get_attr"))
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attrgetter(node.target)(graph)
        if not isinstance(value, torch.Tensor):
            continue
        with graph.graph.inserting_before(first):
            held = graph.graph.placeholder(f"held_{len(tensors)}")
        tensors.append(value)
        held.meta = dict(node.meta)
        node.replace_all_uses_with(held)
        graph.graph.erase_node(node)
    return tensors


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _present(rules: tuple[str, ...], names: list[str]) -> tuple[str, ...]:
    """The splitting ops that a graph has, among its ops called `names`."""
    ops = {name for name in names if any(fnmatchcase(name, rule) for rule in rules)}
    return tuple(sorted(ops))


def _adopted(graph: GraphModule) -> Trace:
    """A graph of Dynamo as a trace: weights are arguments, its first dynamic size `num_tokens`."""
    sources: dict[Node, Leaf | str | Place | None] = {}
    arguments: dict[str, Any] = {}
    for node in graph.graph.find_nodes(op="placeholder"):
        value = node.meta["example_value"]
        if isinstance(value, torch.Tensor):
            arguments[node.name] = value
        sources[node] = Leaf((node.name,), value)
    parameter = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, parameter) for name in arguments])
    examples = Examples(arguments, signature, {})
    width = len(graph.graph.output_node().args[0])  # type: ignore[arg-type]
    trace = Trace(
        graph=graph,
        shape_env=current_shape_env(),
        sources=sources,
        tensors={},
        structure=tuple(Ref(f"o{i}") for i in range(width)),
        examples=examples,
        conditions=Conditions({}, ()),
    )
    labels: dict[Any, str] = {}
    for leaf, dim, size in argument_sizes(trace):
        if (symbol := trace.symbol_of(size)).is_Symbol:
            named = TOKENS in labels.values() or dim == NUMBER
            label = labels.setdefault(symbol, str(symbol) if named else TOKENS)
            examples.symbols[leaf.label, dim] = label
    return trace
