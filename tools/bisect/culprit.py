"""Inside a guilty piece: the shortest beginning of it that is compiled wrongly, by bisection."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from ... import Config, ForwardContext, PreparedModel, forward_context
from ...compile.debug import compile_graph, debug_pieces
from ...torch_compat.tensors import TorchDispatchMode, tree_leaves, tree_map_only
from .case import BisectCase
from .finding import first_wrong
from .observe import Ran

if TYPE_CHECKING:
    from ...compile.ir.plan import Plan

_ALLOCATIONS = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    "new_empty",
    "new_empty_strided",
)
_EMPTY = (
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
)
_FRAME = re.compile(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class WrongCall:
    """The first splitting call with a wrong tensor; `itself` if what it was given is right."""

    index: int
    itself: bool


def find_call(right: Ran, ran: Ran, tolerance: float | None) -> WrongCall | None:
    """None if all calls agree, or if they cannot be seen."""
    for index, (want, have) in enumerate(zip(right.calls, ran.calls, strict=False)):
        if first_wrong(want.before, have.before, tolerance):
            return WrongCall(index, itself=False)
        if first_wrong(want.after, have.after, tolerance):
            return WrongCall(index, itself=True)
    return None


def find_piece(plan: Plan, call: WrongCall | None) -> int | None:
    """The use of a piece that ran last before a wrong call; without one, the last of all."""
    uses = calls = 0
    for step in plan.steps:
        if step.kind == "piece":
            uses += 1
        else:
            if call is not None and calls == call.index:
                break
            calls += 1
    return uses - 1 if uses else None


def find_guard(plan: Plan, size: int) -> tuple[str | None, str]:
    """Where the guard stands that does not hold, and what it says; (None, "") if all are proved."""
    unproved = [guard for guard in plan.guards if not guard.proved]
    broken = [guard for guard in unproved if size in _sizes(guard.failing)]
    if not unproved:
        return None, ""
    guard = (broken or unproved)[0]
    failing = ", ".join(str(one) for one in guard.failing) or guard.method
    return _file(guard.where), f"guard {guard.expression} was not proved: it fails for {failing}"


def _file(where: str | None) -> str | None:
    """`file.py:8` without the directories, which may have been cut in the middle."""
    return where and where.rpartition("/")[2]


def _sizes(failing: tuple[dict[str, int], ...]) -> set[Any]:
    return {size for sizes in failing for size in sizes.values()}


def find_operator(case: BisectCase, prepared: PreparedModel, step: int, use: int) -> str | None:
    """The operator, with the user's line, that makes the piece of `use` wrong in `step`.

    None if the piece is right when it is compiled and run by itself on the same inputs, from
    whatever its memory held before.
    """
    examples = None if case.config.inputs else _arguments(case, 0)
    device = next(iter(case.model.parameters()), torch.empty(0)).device
    graphs = debug_pieces(case.model, case.config, device, examples)
    piece = graphs[prepared.compiled.plan.piece_uses()[use]]
    values = _inputs_of(case, prepared, [graph.graph for graph in graphs], step, use)
    nodes = [node for node in piece.graph.graph.nodes if node.op.startswith("call_")]

    def is_wrong(count: int) -> bool:
        return _wrong(_beginning(piece.graph, nodes[:count]), piece.inputs, values, case)

    if not nodes or not is_wrong(len(nodes)):
        return None
    right, wrong = 0, len(nodes)
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
    return None if nodes[wrong - 1].target in _ALLOCATIONS else _described(nodes[wrong - 1])


def _inputs_of(
    case: BisectCase, prepared: PreparedModel, graphs: Sequence[GraphModule], step: int, use: int
) -> list[Any]:
    """What the piece of `use` takes in `step` when all pieces run node by node."""
    taken: list[Any] = []

    def hook(index: int, piece: Any) -> Any:
        def call(args: list[Any]) -> Any:
            if index == use:
                taken[:] = _copied(args)
            return piece(args)

        return call

    compiled = prepared.compiled
    of_artifact = {a: piece for s in compiled.plan.ranges for piece, a in enumerate(s.artifacts)}
    pieces = tuple(_plainly(graphs[of_artifact[a]]) for a in range(len(compiled.pieces)))
    run = replace(compiled, pieces=pieces).link(piece_hook=hook)
    for each, earlier in enumerate(case.steps[: step + 1]):
        args, kwargs = _arguments(case, each)
        bound = inspect.signature(case.model.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        tensors = [_at(bound.arguments, i.path) for i in prepared.compiled.plan.inputs]
        metadata = earlier.metadata_for(earlier.without_graph())
        with forward_context(ForwardContext(case.layers, metadata)), torch.no_grad():
            run(*tensors)
    return taken


def _plainly(graph: GraphModule) -> Any:
    return lambda args: graph(*args)


def _arguments(case: BisectCase, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return case.steps[step].args, dict(case.steps[step].kwargs)


def _at(arguments: Any, path: Sequence[str | int]) -> Any:
    for part in path:
        arguments = arguments[part]
    return arguments


def _beginning(graph: GraphModule, nodes: Sequence[Node]) -> GraphModule:
    """The graph up to the last of `nodes`; it returns every tensor that is used after them."""
    kept = set(nodes)
    beginning = Graph()
    copies: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "get_attr") or node in kept:
            copies[node] = beginning.node_copy(node, copies.__getitem__)
    live = [
        copies[node]
        for node in nodes
        if isinstance(node.meta.get("example_value"), Tensor)
        and (node is nodes[-1] or any(user not in kept for user in node.users))
    ]
    beginning.output(tuple(live))
    return GraphModule(graph, beginning)


def _wrong(graph: GraphModule, fakes: list[Any], values: list[Any], case: BisectCase) -> bool:
    """Whether `graph` compiled differs from itself run node by node; a failure to compile does."""
    with torch.no_grad():
        expected, other = (_run_on_memory_of(fill, graph, values) for fill in (0, 1))
        if not expected:
            return False
        try:
            got = tree_leaves(_compiled(graph, fakes, case.config)(_copied(values)))
        except Exception:
            return True
    seen = [_where_equal(*each) for each in zip(expected, other, got, strict=True)]
    return first_wrong(expected, seen, case.tolerance) is not None


class _Filled(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory that nobody has written yet holds `fill`."""

    def __init__(self, fill: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill = fill

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.fill_(self._fill) if func in _EMPTY else result


def _run_on_memory_of(fill: int, graph: GraphModule, values: list[Any]) -> list[Any]:
    with _Filled(fill):
        return tree_leaves(graph(*_copied(values)))


def _where_equal(one: Any, other: Any, got: Any) -> Any:
    """`got`, but `one` where that depends on what memory held before: anything is right there."""
    if one.shape != got.shape:
        return got
    return torch.where((one == other) | (one.isnan() & other.isnan()), got, one)


def _compiled(graph: GraphModule, fakes: list[Any], config: Config) -> Any:
    """A copy is compiled: compilers change the graph they are given."""
    copied = Graph()
    copied.output(copied.graph_copy(graph.graph, {}))
    return compile_graph(GraphModule(graph, copied), fakes, config)


def _copied(values: list[Any]) -> list[Any]:
    copied: list[Any] = tree_map_only(Tensor, torch.Tensor.clone, values)
    return copied


def _described(node: Node) -> str:
    target = node.target if isinstance(node.target, str) else node._pretty_print_target(node.target)
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{target} ({':'.join(frames[-1])})" if frames else str(target)
