"""Where a recording breaks: at splitting ops, and at functions decorated with `break_graph`.

A compiled model is linked with each piece as one operation and each splitting op as a break. A
model that is not traced runs as it is (breakable capture) and breaks wherever it calls a decorated
function or a splitting op.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from ...compile.ir.locations import op_line
from ...compile.ir.ops import resolve_op, tensors_in
from ...compile.ir.plan import Plan
from ...compile.plan.codegen import Hook
from ...compile.plan.compiled_model import CompiledModel
from ...compile.plan.result_forms import checked_link
from ...compile.plan.step_names import call_names, piece_names, ranged
from ...errors import RefusedInCapture
from ...torch_compat.basics.ops import CALL_OP, OpOverload, awaited, ops_through, returns_early
from ...torch_compat.basics.tensors import is_fake, is_faking, never_traced
from ...torch_compat.compiling.partition import partitions_through
from ...torch_compat.compiling.regions import regions_through
from .recorder import ACTIVE
from .session import ONE_AT_A_TIME

P = ParamSpec("P")
R = TypeVar("R")
Fn = Callable[..., Any]


class StandIn(Protocol):
    """Stands in for breaks, in runs of a model without them."""

    def call(self, name: str, fake: Fn, args: Any, kwargs: Any) -> Any: ...

    def run_piece(self, fn: Fn, args: Any) -> Any:
        """Run compiled code, which no dispatch mode sees as a whole."""


WITHOUT_BREAKS: ContextVar[StandIn | None] = ContextVar("without_breaks", default=None)
"""What stands in for the breaks of this thread."""


@overload
def break_graph(fn: Callable[P, R]) -> Callable[P, R]: ...
@overload
def break_graph(*, fake: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def break_graph(fn: Any = None, *, fake: Callable[..., Any] | None = None) -> Any:
    """Make `fn` a splitting function: a PIECEWISE recording runs it eagerly between two graphs.

    In a FULL recording and outside of recordings it is a plain call. When a model's forward is run
    on fake tensors to find the form of its result, `fake` is called instead; without it, `fn` is
    assumed to write to its tensor arguments and to return nothing.
    """
    if fn is None:
        return partial(_breaking, fake=fake)
    return _breaking(fn, fake=fake)


def _breaking(
    fn: Callable[P, R], fake: Callable[..., Any] | None, name: str = ""
) -> Callable[P, R]:
    name = name or _name(fn)
    on_fakes = fake or (fn if isinstance(fn, OpOverload) else _write_to)

    @wraps(fn)
    def breaking(*args: P.args, **kwargs: P.kwargs) -> R:
        recorder = ACTIVE.get()
        if recorder is not None and recorder.breaks:
            result: R = recorder.splitting_op(name, fn, args, kwargs)
            return result
        if is_faking():
            return on_fakes(*args, **kwargs)  # type: ignore[return-value]
        if (stand_in := WITHOUT_BREAKS.get()) is not None:
            return stand_in.call(name, on_fakes, args, kwargs)  # type: ignore[no-any-return]
        return fn(*args, **kwargs)

    never_traced(breaking)
    return breaking


def _write_to(*args: Any, **kwargs: Any) -> None:
    """The default fake: write to every tensor argument."""
    for tensor in tensors_in((args, kwargs)):
        if is_fake(tensor):
            tensor.zero_()


def _name(fn: Callable[..., Any]) -> str:
    """Name of `fn` in reports: the full name of an operator, or the function's own."""
    while isinstance(fn, partial):
        fn = fn.func
    return str(fn) if isinstance(fn, OpOverload) else getattr(fn, "__name__", type(fn).__name__)


def opaque_piece(fn: Callable[..., R], text: str = "") -> Callable[..., R]:
    """Make `fn`, a compiled piece, one operation of a recording; outside of one a plain call.

    An error names the user's line by `text`, the piece's annotated source.
    """

    @wraps(fn)
    def piece(*args: Any) -> R:
        recorder = ACTIVE.get()
        if recorder is None:
            stand_in = WITHOUT_BREAKS.get()
            return fn(*args) if stand_in is None else stand_in.run_piece(fn, args)
        try:
            result: R = recorder.piece(fn, args)
        except RefusedInCapture as error:
            name = str(error.facts["op"]).split(".")[:2][-1]
            where = error.where or op_line(text, re.compile(rf"\b{name}\("))
            raise type(error)(where=where, **error.facts) from error
        return result

    return piece


def _record_hooks(plan: Plan) -> tuple[Hook, Hook]:
    """The hooks of `CompiledModel.link` with which pieces and splitting ops are recorded, each in a
    range that profilers of a capture show."""
    texts = [plan.pieces[piece].text for piece in plan.piece_uses()]
    pieces, calls = piece_names(plan), call_names(plan)
    return (
        lambda use, piece: ranged(pieces[use], opaque_piece(piece, texts[use])),
        lambda use, op: ranged(calls[use], break_graph(op)),
    )


def recordable(compiled: CompiledModel, splitting_ops: Sequence[str]) -> Callable[..., Any]:
    """The function to record: from the plan's input tensors to its results.

    Of a model that is not traced, each code of a region that it compiles is one operation. Code
    that Inductor partitioned calls splitting ops itself: each partition is one.
    """
    cuts = compiled.plan.cuts()
    if compiled.traced and not cuts:
        return checked_link(compiled, _record_hooks)
    text = "\n".join(each.text for plan in compiled.plan.intervals() for each in plan.pieces)
    through = partitions_through if cuts else regions_through
    forward, calls = compiled.link(), dict[Any, Fn]()
    for op in map(resolve_op, cuts or splitting_ops):
        assert isinstance(op, OpOverload)
        call = partial(awaited if returns_early(op) else CALL_OP, op)
        break_at = _breaking(call, fake=partial(CALL_OP, op), name=str(op))
        calls[op] = calls[op.overloadpacket] = break_at

    def breaking(*inputs: Any) -> Any:
        with ONE_AT_A_TIME, ops_through(calls), through(partial(opaque_piece, text=text)):
            return forward(*inputs)

    return breaking
