"""Inductor's graph partition: cut generated code at the splitting ops, and replace its parts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import Any

from torch.fx import GraphModule

from ...errors import NotPartitioned
from ..basics.ops import is_op, overload_of
from ..basics.patch import replaced
from ..basics.tensors import tree_leaves

_OPS = "custom_should_partition_ops"

Call = tuple[str, list[str]]
"""An op and the texts that it is given, such as the name of a layer."""


def partition_options(ops: Sequence[str]) -> dict[str, Any]:
    """Inductor's options for code that is partitioned at `ops`; none without ops.

    By default a `cat` is computed part by part into its result, which every partition with a part
    would allocate again, so that all parts but those of one partition are lost (2.11 to 2.13). And
    by default two passes move independent calls to where they need less memory.
    """
    reorder = {"reorder_for_locality": False, "reorder_for_peak_memory": False}
    options = {"graph_partition": True, "force_pointwise_cat": True, **reorder, _OPS: [*ops]}
    return options if ops else {}


@contextmanager
def partitioned(graph: GraphModule, options: Mapping[str, Any]) -> Iterator[None]:
    """Make Inductor partition the code for `graph` at the ops that `options` name.

    By itself it leaves all code outside of partitions unless it uses CUDA graphs itself, and
    always that of a CPU. Raises NotPartitioned unless the code calls these ops as often as the
    graph, and in its order: Inductor drops calls without a use that it sees, and orders others by
    what schemas say that they read and write, but an op may have state that its schema lacks.
    """
    ops = options.get(_OPS, ())
    if not ops:
        yield
        return
    from torch._inductor import ir
    from torch._inductor.scheduler import Scheduler

    expected = [
        _call(overload_of(node).name(), (node.args, node.kwargs))
        for node in graph.graph.nodes
        if is_op(node.target) and overload_of(node).name() in ops
    ]
    faults: list[str] = []

    def is_call(node: Any) -> bool:
        return isinstance(node.node, ir.FallbackKernel)

    def is_cut(node: Any) -> bool:
        """Whether a node calls one of `ops`, or takes an element of what it returned."""
        kernel = node.node.inputs[0] if isinstance(node.node, ir.MultiOutput) else node.node
        return isinstance(kernel, ir.FallbackKernel) and _name(kernel) in ops

    def calls_together(nodes: list[Any]) -> list[Any]:
        """`nodes` with what does not need the calls before it in front of them: Inductor defers
        elementwise work to its first use, where it would stand between two calls."""
        ordered, calls = list[Any](), list[Any]()
        for outside, group in groupby(nodes, is_cut):
            run, names = [*group], {call.get_name() for call in calls}
            if outside:
                calls += run
                continue
            if any(names & each.ancestors or is_call(each) for each in run):
                ordered, calls = ordered + calls, []
            ordered += run
        return ordered + calls

    def graph_partition(scheduler: Any) -> Any:
        cut = [node.node for node in scheduler.nodes if is_call(node) and is_cut(node)]
        calls = [_call(_name(each), each.constant_args) for each in cut]
        if calls != expected:
            faults.append(_difference(expected, calls))
            raise RuntimeError(faults[0])
        scheduler.nodes = calls_together(scheduler.nodes)
        scheduler.compute_last_usage()
        groups = [(outside, [*nodes]) for outside, nodes in groupby(scheduler.nodes, is_cut)]
        partitions, outside = [nodes for _, nodes in groups], [each for each, _ in groups]
        signatures = scheduler.get_graph_partition_signature(partitions, outside)
        scheduler.compute_graph_partition_maps(signatures)
        return partitions, signatures

    try:
        with replaced(Scheduler, "graph_partition", graph_partition):
            yield
    except Exception:
        if not faults:
            raise
        raise NotPartitioned(reason=faults[0]) from None


def _name(kernel: Any) -> str:
    return kernel.op_overload.name() if kernel.op_overload is not None else ""


def _call(op: str, args: Any) -> Call:
    return op, sorted(text for text in tree_leaves(args) if isinstance(text, str))


def _difference(expected: list[Call], calls: list[Call]) -> str:
    """The first call in which the code differs from the graph."""
    place = next(
        (n for n, pair in enumerate(zip(expected, calls, strict=False)) if pair[0] != pair[1]),
        min(len(expected), len(calls)),
    )
    wanted, found = (
        f"{calls[place][0]}({', '.join(calls[place][1])})" if place < len(calls) else "no more"
        for calls in (expected, calls)
    )
    return f"the model calls {wanted} as number {place + 1}, and the code {found}"


@contextmanager
def partitions_through(hook: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Call `hook(partition)` in place of each partition of Inductor's code.

    The code calls its partitions and, between them, the ops at which it was cut.
    """

    def run(original: Callable[..., Any], graph: Any, args: Any) -> Any:
        runner = graph.compiled_fn_runner
        partitions = getattr(runner, "partitions", None)
        if not partitions:  # of a region that a splitting op compiles
            return original(graph, args)
        runner.partitions = [hook(partial(_on_a_copy, each)) for each in partitions]
        try:
            return original(graph, args)
        finally:
            runner.partitions = partitions

    with code_run_by(run):
        yield


def _on_a_copy(code: Callable[[list[Any]], Any], args: Any) -> Any:
    """Code empties its list of arguments, and a replay passes it again."""
    return code(list(args))


@contextmanager
def code_run_by(run: Callable[[Callable[..., Any], Any, Any], Any]) -> Iterator[None]:
    """Call `run(original, code, args)` where any code of Inductor is called."""
    module = sys.modules.get("torch._inductor.output_code")
    if module is None:
        yield
        return
    original: Any = module.CompiledFxGraph.__call__

    def call(graph: Any, args: Any) -> Any:
        return run(original, graph, args)

    with replaced(module.CompiledFxGraph, "__call__", call):
        yield
