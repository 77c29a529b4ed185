"""From a wrong step to the operation.

Of a graph with the replay backend: a tape has the operations of a step whether it captures or not.
So the step runs once by its graph and once, on the same inputs without padding, as the model runs
it, and the two tapes are compared. Of the model itself two runs are compared, see `OpTrace`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ... import RuntimeMode
from ...compile.guards.tolerance import FACTOR, FLOOR, differences
from ...compile.ir.locations import user_line
from ...compile.ir.ops import tensors_in, written_by
from ...runtime.backends.ownership import ALLOCATIONS, Ownership
from ...runtime.backends.replay.tape import COPIES, Operation, Tape
from ...runtime.backends.replay.tape_graph import TapeGraph
from ...runtime.capture.breaks import recordable
from ...runtime.capture.recorder import ACTIVE
from ...torch_compat.basics.frames import calling_module
from ...torch_compat.basics.ops import OpOverload, overload_name
from ...torch_compat.basics.tensors import LightDispatchMode, storage_id, tree_leaves
from .case import BisectCase, first_wrong
from .culprit import Cause, context_of, inputs_of
from .observe import copies, run_eagerly, run_prepared
from .stages import Stage, prepared_for
from .state import ModelState

_COMPILED = "compiled code"


@dataclass(frozen=True, slots=True)
class RanOp:
    """An operation as it ran: the numbers it took, what it returned and wrote, and the line and
    module that called it."""

    op: str
    numbers: list[Any]
    results: list[Tensor]
    line: str
    module: str
    changed: Sequence[Tensor | None] = ()
    """Of each of `results` the elements that it changed, if it wrote to it."""
    read: Sequence[int] = ()
    made: Sequence[int] = ()
    """Memory that it read, and that it returned or wrote."""

    def __str__(self) -> str:
        where = f" ({self.line.rpartition('/')[2]})" if self.line else ""
        return f"{self.op.partition('.')[0]}{where}"

    def in_module(self, how: str) -> str:
        """How it differs, after the module that called it."""
        return "; ".join(filter(None, (self.module and f"in module {self.module}", how)))


def find_operation(case: BisectCase, stage: Stage, index: int, state: ModelState) -> Cause:
    """The first operation of a step that gives something else in its graph, and how it differs.

    None if there is none: then the padding, which the step does not have here, is the cause.
    """
    step, before = case.steps[index], replace(case, steps=case.steps[:index])
    sizes = sorted({*(case.config.capture_sizes or ()), step.batch.num_tokens})
    exact = replace(case, config=case.config.changed(capture_sizes=sizes))
    right = run_eagerly(case, state)  # what Python keeps is as before the stage
    state.restore()
    with prepared_for(exact, stage) as prepared:
        state.restore()
        run_prepared(before, prepared, state, right)
        decision = prepared.dispatch(step.batch)
        captured: list[RanOp] = []
        for graph in dict(prepared.recordings())[decision.graph_index].graphs:
            if not isinstance(graph, TapeGraph):
                return None, None, "its operations can be compared on a CPU only"
            graph.calls = tuple(partial(_note, captured, call) for call in graph.calls)
        metadata = step.metadata_for(decision)
        prepared.run(decision, *step.args, metadata=metadata, **step.kwargs)
        state.restore()
        run_eagerly(before, state)
        uncaptured = _Uncaptured(decision.mode is RuntimeMode.PIECEWISE, case.model)
        run = recordable(prepared.compiled, case.config.splitting_ops)
        inputs = inputs_of(case, prepared.compiled.plan, index)
        token = ACTIVE.set(uncaptured)  # type: ignore[arg-type]
        try:
            with context_of(case, index), torch.no_grad(), uncaptured:
                run(*inputs)
        finally:
            ACTIVE.reset(token)
    compiled = False
    for want, have in zip_longest(uncaptured.ops, captured):
        difference = _difference(want, have, case.tolerance, compiled)
        place = want or have
        compiled |= place.op == _COMPILED
        if difference is not None:
            return str(place), None, place.in_module(difference)
    return None, None, ""


def _difference(
    want: RanOp | None, have: RanOp | None, tolerance: float | None, compiled: bool
) -> str | None:
    if want is None or have is None or want.op != have.op:
        names = [each.op if each else "nothing more" for each in (want, have)]
        return f"the model calls {names[0]} where the graph has {names[1]}"
    if first_wrong(want.results, have.results, tolerance) is None:
        return None
    if want.numbers != have.numbers:
        return f"it takes {want.numbers} in the model and {have.numbers} in the graph"
    return f"its result differs, and none before it{' but of compiled code' * compiled}"


def _note(ops: list[RanOp], call: Operation) -> None:
    call()
    ops.append(_of_tape(call))


def _of_tape(operation: Operation, line: str = "", module: str = "") -> RanOp:
    """An operation of a tape that has just run."""
    copied = operation.func in COPIES
    call = operation.args[0] if copied else operation
    leaves = tree_leaves((call.args, call.keywords))
    numbers = [each for each in leaves if isinstance(each, int | float)]
    if not isinstance(call.func, OpOverload):  # its results may be memory that nothing has written
        return RanOp(_COMPILED, numbers, [], line, module)
    tensors = [operation.args[1]] if copied else []
    tensors += written_by(call.func, call.args, call.keywords)
    op = overload_name(call.func).rpartition(".")[0]
    return RanOp(op, numbers, copies(tensors), line, module)


class OpTrace(LightDispatchMode):
    """The operations of one run of a model. A custom op is one."""

    sees_inside = True

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[RanOp] = []
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        written = list(written_by(func, args, given))
        before = copies(written)
        result = func(*args, **given)
        name, leaves = overload_name(func), tree_leaves((args, given))
        if name.partition(".")[0].partition("::")[2] in ALLOCATIONS:
            return result
        read = [storage_id(each) for each in tensors_in((args, given))]
        fresh = [each for each in tensors_in(result) if storage_id(each) not in read]
        changed = [one != other for one, other in zip(before, written, strict=True)]
        op = RanOp(
            name,
            [each for each in leaves if isinstance(each, int | float)],
            copies([*fresh, *written]),
            user_line() or "",
            calling_module(self._module_names),
            [*([None] * len(fresh)), *changed],
            read,
            [storage_id(each) for each in (*fresh, *written)],
        )
        self.ops.append(op)
        return result


def first_other_op(ops: Sequence[RanOp], others: Sequence[RanOp]) -> tuple[int, str] | None:
    """The first of `ops` whose result differs in the other run by more than what it read explains,
    and how. Rows that only the other run has do not count."""
    apart: dict[int, float] = {}
    for index, (one, other) in enumerate(zip_longest(ops, others)):
        if one is None or other is None or one.op != other.op:
            names = [str(each) if each else "nothing more" for each in (one, other)]
            return min(index, len(ops) - 1), f"it runs {names[1]} there instead of {names[0]}"
        read = max((apart.get(memory, 0.0) for memory in other.read), default=0.0)
        most = max(map(_apart, one.results, other.results, one.changed), default=0.0)
        if most > FLOOR + FACTOR * read:
            numbers = one.numbers != other.numbers
            how = f"it takes {one.numbers} and {other.numbers}" if numbers else ""
            return index, one.in_module(how)
        apart.update(dict.fromkeys(other.made, most))
    return None


def _apart(one: Tensor, other: Tensor, changed: Tensor | None) -> float:
    if one.dim() == other.dim():
        other = other[tuple(slice(size) for size in one.shape)]
    if changed is not None and other.shape == one.shape:
        other = torch.where(changed, other, one)
    return float(differences(one, other).amax()) if one.numel() else 0.0


class _Uncaptured(Tape):
    """In place of a recorder: breaks and compiled regions run, and nothing is captured."""

    def __init__(self, breaks: bool, model: torch.nn.Module) -> None:
        super().__init__(Ownership())
        self.breaks = breaks
        self.ops: list[RanOp] = []
        self._module_names = {id(module): name for name, module in model.named_modules()}

    def _record(self, *operation: Any) -> None:
        super()._record(*operation)
        line, module = user_line() or "", calling_module(self._module_names)
        self.ops.append(_of_tape(self.operations[-1], line, module))

    def splitting_op(self, name: str, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.breaks = False  # of a break inside of this one
        self.stop()
        try:
            return fn(*args, **kwargs)
        finally:
            self.start()
            self.breaks = True

    piece = Tape.opaque
