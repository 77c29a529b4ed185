"""From a wrong step to its cause: the guard, the splitting call, the piece, the pass, the operator.

An operator or a pass is named only if the piece was run without it and was right.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node

from ... import ForwardContext, PreparedModel, forward_context
from ...compile.ir.ops import ALLOCATIONS, FilledMemory, clones, tensors_in, where_written
from ...config import compile_config
from ...runtime.core.binding import at
from ...torch_compat.basics.tensors import tree_leaves, tree_map_only
from .case import BisectCase, first_wrong
from .observe import Call, Ran, splitting_ops
from .pieces import DebugPiece, compile_graph, debug_pieces, passes_of, static_sizes

if TYPE_CHECKING:
    import sympy

    from ...compile.ir.config import GraphPass
    from ...compile.ir.plan import Plan

Cause = tuple[str | None, str | None, str]
"""What a search found: operator, pass and note."""

_FRAME = re.compile(r'File "(?:[^"]*/)?([^"/]+)", line (\d+)')


@dataclass(frozen=True, slots=True)
class WrongCall:
    """The first splitting call with a wrong tensor; `itself` if its inputs are right.

    `buffer` is one of the model that a piece before it has written wrongly.
    """

    index: int
    op: str
    itself: bool
    buffer: str = ""


def find_call(
    plan: Plan, right: Ran, ran: Ran, tolerance: float | None, again: Callable[[], Ran]
) -> WrongCall | None:
    """None if all splitting calls agree, or if they cannot be observed; `again` repeats `right`."""
    ops = splitting_ops(plan)
    pairs = zip(right.calls_of(ops), ran.calls_of(ops), strict=False)
    for index, (want, have) in enumerate(pairs):
        written = right.buffers.written(want.buffers)

        def buffers(call: Call, written: Sequence[Tensor] = written) -> list[Tensor]:
            return call.buffers.rows_of(written)

        for tensors, itself in (
            (buffers, False), (attrgetter("before"), False), (attrgetter("after"), True),
        ):  # fmt: skip

            def run(index: int = index, tensors: Any = tensors) -> Any:
                return tensors(again().calls_of(ops)[index])

            wrong = first_wrong(tensors(want), tensors(have), tolerance, run)
            if wrong is not None:
                buffer = right.buffers.names[wrong.tensor] if tensors is buffers else ""
                return WrongCall(index, want.op, itself, buffer)
    return None


def find_piece(plan: Plan, right: Ran, call: WrongCall | None) -> int | None:
    """The use of a piece that ran last before a wrong call; without one, the last of all.

    None if splitting calls cannot be observed, so that any piece may be wrong.
    """
    calls_in_plan = sum(step.kind == "call" for step in plan.steps)
    if call is None and len(right.calls_of(splitting_ops(plan))) != calls_in_plan:
        return None
    uses = calls = 0
    for step in plan.steps:
        if step.kind == "piece":
            uses += 1
        else:
            if call is not None and calls == call.index:
                break
            calls += 1
    return uses - 1 if uses else None


def find_guard(plan: Plan, size: int) -> Cause:
    """Source location and text of the guard that does not hold, if not all are proved."""
    unproved = [guard for guard in plan.guards if not guard.proved]
    broken = [g for g in unproved if any(size in sizes.values() for sizes in g.failing)]
    if not unproved:
        return None, None, ""
    guard = (broken or unproved)[0]
    failing = ", ".join(str(one) for one in guard.failing) or guard.method
    operator = guard.where and guard.where.rpartition("/")[2]  # directories may be cut
    return operator, None, f"guard {guard.expression} was not proved: it fails for {failing}"


def context_of(case: BisectCase, step: int) -> AbstractContextManager[Any]:
    """The forward context of a step without a graph, which ops inside a piece may read."""
    one = case.steps[step]
    decision = one.without_graph()
    context = ForwardContext(
        case.layers, one.metadata_for(decision), decision, one.batch.num_tokens
    )
    return forward_context(context)


def inputs_of(case: BisectCase, plan: Plan, step: int) -> list[Any]:
    """What a plan takes in a step."""
    args, kwargs = _arguments(case, step)
    bound = inspect.signature(case.model.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return [functools.reduce(at, i.path, bound.arguments) for i in plan.inputs]


class PieceSearch:
    """The pieces of a case, traced again, to compile the start of a piece like the whole."""

    def __init__(self, case: BisectCase, prepared: PreparedModel) -> None:
        self._case = case
        self._prepared = prepared
        self._config = compile_config(case.config)
        examples = None if case.config.inputs else _arguments(case, 0)
        device = next(iter(case.model.parameters()), torch.empty(0)).device
        self.pieces = debug_pieces(case.model, self._config, device, examples)

    def pieces_at(self, num_tokens: int) -> list[DebugPiece]:
        """The pieces that run in steps of this size, as the plan for it numbers them."""
        plan = self._prepared.compiled.plan
        return self.pieces[plan.intervals().index(plan.at(num_tokens))]

    def _piece(self, use: int, num_tokens: int) -> DebugPiece:
        uses = self._prepared.compiled.plan.at(num_tokens).piece_uses()
        return self.pieces_at(num_tokens)[uses[use]]

    def find(self, use: int, step: int, num_tokens: int) -> Cause:
        """The cause in the piece of `use`, which is wrong in `step`."""
        piece = self._piece(use, num_tokens)
        values = self.inputs_of(step, use)
        with context_of(self._case, step):
            return self.find_in(piece, values, num_tokens)

    def find_at_size(
        self, piece: DebugPiece, sizes: dict[sympy.Symbol, int], num_tokens: int
    ) -> Cause:
        """The same for a piece on generated inputs."""
        return self.find_in(piece, piece.generated_inputs(sizes), num_tokens)

    def find_in(self, piece: DebugPiece, values: list[Any], num_tokens: int) -> Cause:
        """The same for a piece on `values`."""
        passes = passes_of(piece, self._config, num_tokens)
        nodes = [node for node in piece.graph.graph.nodes if node.op.startswith("call_")]

        def is_wrong(count: int, used: Sequence[GraphPass]) -> bool:
            beginning = _beginning(piece.graph, nodes[:count])
            return self._is_wrong(beginning, piece, values, num_tokens, used)

        if not nodes or not is_wrong(len(nodes), passes):
            return None, None, "compiled by itself it is right"
        computed = _NodeValues(piece.graph, values).values
        for node in nodes:
            if (form := _unlike_its_fake(computed.get(node), node)) is not None:
                return described(node), None, form
        needed = first_wrong_count(len(passes), lambda count: is_wrong(len(nodes), passes[:count]))
        used = passes[:needed]
        count = first_wrong_count(len(nodes), lambda count: is_wrong(count, used))
        node = nodes[count - 1]
        operator = None if node.target in ALLOCATIONS else described(node)
        if not used:
            return operator, None, ""
        return operator, used[-1].name, f"right without the pass {used[-1].name}"

    def inputs_of(self, step: int, use: int) -> list[Any]:
        """What the piece of `use` takes in `step` when all pieces run node by node."""
        taken: list[Any] = []

        def hook(index: int, piece: Any) -> Any:
            def call(args: list[Any]) -> Any:
                if index == use:
                    taken[:] = clones(args)
                return piece(args)

            return call

        case, compiled = self._case, self._prepared.compiled
        graphs = {
            artifact: piece.graph
            for plan, pieces in zip(compiled.plan.intervals(), self.pieces, strict=True)
            for span in plan.ranges
            for artifact, piece in zip(span.artifacts, pieces, strict=True)
        }
        of_artifacts = (graphs[artifact] for artifact in range(len(compiled.pieces)))
        eager = replace(compiled, pieces=tuple(map(_taking_a_list, of_artifacts)))
        run = eager.link(lambda plan: (hook, lambda use, op: op))
        for each in range(step + 1):
            with context_of(case, each), torch.no_grad():
                run(*inputs_of(case, compiled.plan, each))
        return taken

    def _is_wrong(
        self,
        graph: GraphModule,
        piece: DebugPiece,
        values: list[Any],
        num_tokens: int,
        passes: Sequence[GraphPass],
    ) -> bool:
        """Whether `graph` compiled differs from itself run node by node."""
        case = self._case

        def run(fill: int = 0) -> list[Any]:
            inputs = clones(values)
            return _compared(FilledMemory(graph, fill).run(*inputs), inputs)

        with torch.no_grad():
            if not any(node.op.startswith("call_") for node in graph.graph.nodes):
                return False
            expected, other = run(), run(1)
            copied = Graph()  # compilers modify their input graph
            copied.output(copied.graph_copy(graph.graph, {}))
            compiled = compile_graph(
                GraphModule(graph, copied),
                piece.inputs,
                self._config,
                passes=passes,
                sizes=static_sizes(piece, self._config, num_tokens),
            )
            inputs = clones(values)
            got = _compared(compiled([*inputs]), inputs)
            seen = [
                where_written(*each) if each[0].shape == each[2].shape else each[2]
                for each in zip(expected, other, got, strict=True)
            ]
            return first_wrong(expected, seen, case.tolerance, run) is not None


def first_wrong_count(most: int, is_wrong: Callable[[int], bool]) -> int:
    """The smallest wrong count by bisection, if `most` is wrong: the count before it is right."""
    if is_wrong(0):
        return 0
    right, wrong = 0, most
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (right, middle) if is_wrong(middle) else (middle, wrong)
    return wrong


def _taking_a_list(graph: GraphModule) -> Any:
    return lambda args: graph(*args)


def _arguments(case: BisectCase, step: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return case.steps[step].args, dict(case.steps[step].kwargs)


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


class _NodeValues(Interpreter):
    """Runs a graph node by node and keeps the value of each."""

    def __init__(self, graph: GraphModule, values: list[Any]) -> None:
        super().__init__(graph)
        self.values: dict[Node, Any] = {}
        with torch.no_grad():
            self.run(*clones(values))

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = tree_map_only(Tensor, torch.Tensor.clone, value)
        return value


def _unlike_its_fake(value: Any, node: Node) -> str | None:
    """How a result differs from what the operator's fake gave, on which compiled code relies."""
    fake = node.meta.get("example_value")
    if not isinstance(value, Tensor) or not isinstance(fake, Tensor):
        return None
    sizes = zip(value.shape, fake.shape, strict=False)
    same_sizes = all(one == other for one, other in sizes if isinstance(other, int))
    if value.dtype is fake.dtype and value.dim() == fake.dim() and same_sizes:
        return None
    one, other = (f"{each.dtype} {tuple(each.shape)}" for each in (value, fake))
    return f"its result is {one}, and its fake says {other}"


def _compared(results: Any, inputs: list[Any]) -> list[Any]:
    """The results of a piece, and its inputs as they are afterwards: it may write to them."""
    return [*tree_leaves(results), *tensors_in(inputs)]


def described(node: Node) -> str:
    """The operator with its line in the user's code."""
    target = node.target if isinstance(node.target, str) else node._pretty_print_target(node.target)
    frames = _FRAME.findall(node.meta.get("stack_trace") or "")
    return f"{target} ({':'.join(frames[-1])})" if frames else str(target)
