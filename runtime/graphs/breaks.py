"""Where a recording breaks: at splitting ops, and at functions decorated with `break_graph`.

A compiled model is linked with each piece as one operation and each splitting op as a break. A
model that is not traced runs as it is (breakable capture) and breaks wherever it calls a decorated
function or a splitting op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar, overload

from torch.overrides import TorchFunctionMode

from ...compile.ir.ops import resolve_op, tensors_in
from ...compile.plan.compiled_model import CompiledModel
from ...torch_compat.basics.ops import OpOverload
from ...torch_compat.basics.tensors import is_fake, is_faking
from ..steps.row_mixing import WITHOUT_BREAKS
from .recorder import ACTIVE

P = ParamSpec("P")
R = TypeVar("R")


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


def _breaking(fn: Callable[P, R], fake: Callable[..., Any] | None) -> Callable[P, R]:
    name = _name(fn)
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


def opaque_piece(fn: Callable[..., R]) -> Callable[..., R]:
    """Make `fn`, a compiled piece, one operation of a recording; outside of one a plain call."""

    @wraps(fn)
    def piece(*args: Any) -> R:
        recorder = ACTIVE.get()
        if recorder is None:
            return fn(*args)
        result: R = recorder.piece(fn, args)
        return result

    return piece


def recordable(compiled: CompiledModel, splitting_ops: Sequence[str]) -> Callable[..., Any]:
    """The function to record: from the plan's input tensors to its results."""
    if compiled.traced:
        return compiled.link(
            piece_hook=lambda use, piece: opaque_piece(piece),
            call_hook=lambda use, op: break_graph(op),
        )
    forward, ops = compiled.link(), frozenset(map(resolve_op, splitting_ops))

    def breaking(*inputs: Any) -> Any:
        with _BreakAt(ops):
            return forward(*inputs)

    return breaking


class _BreakAt(TorchFunctionMode):
    """Makes every call of some operators a break. Operators called by name arrive as packets."""

    def __init__(self, ops: frozenset[Any]) -> None:
        super().__init__()
        self._breaking = {op: break_graph(op) for op in ops}
        self._breaking |= {op.overloadpacket: call for op, call in self._breaking.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._breaking.get(func, func)(*args, **(kwargs or {}))
