"""What ops return is compared with what the trace was told by their fake kernels.

A piece is compiled for the form that the fake kernel of a splitting op said: of another dtype it
would read other bits, of another shape or strides other elements. The results of splitting ops are
compared when code first runs at a size, those of ops inside a piece when it is run under
`CheckedOps`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor

from ...errors import ResultNotAsTraced
from ...torch_compat.basics.ops import fake_function, op_name
from ...torch_compat.basics.tensors import FakeTensorMode, LightDispatchMode, tree_map_only
from ..ir.locations import op_line
from ..ir.ops import is_custom, tensors_in
from ..ir.plan import Plan, evaluated
from ..ir.serialization import dtype_name
from .codegen import AfterCall, StepFn
from .compiled_model import CompiledModel, Hooks

_FAILED_OP = re.compile(r"Error in op: (?:torch\.ops\.)?(\w+)\.(\w+)")
"""In an assertion of Inductor's code, whose first line says what differs."""


def checked_link(compiled: CompiledModel, hooks: Hooks | None = None) -> StepFn:
    """`compiled.link(hooks)`, which raises ResultNotAsTraced for an op that returns another form
    than its fake kernel said."""
    call = compiled.link(hooks, _after_call)

    def checked(*inputs: Tensor) -> tuple[Any, ...]:
        try:
            return call(*inputs)
        except AssertionError as error:
            if found := _FAILED_OP.search(str(error)):
                texts = (piece.text for piece in compiled.plan.pieces)
                lines = (op_line(text, re.compile(rf"\b{found[2]}\b")) for text in texts)
                where, fact = next(filter(None, lines), None), str(error).splitlines()[0]
                raise _refused("::".join(found.groups()), fact, "another one", where) from error
            raise

    return checked


def is_checked(plan: Plan) -> bool:
    """Whether there are results of splitting ops to compare."""
    return any(any(call.forms) for each in plan.intervals() for call in each.calls())


def _after_call(plan: Plan) -> AfterCall:
    calls, names = plan.calls(), [symbol.name for symbol in plan.symbols]

    def compare(use: int, results: Sequence[Any], sizes: Sequence[int]) -> None:
        values = dict(zip(names, sizes, strict=True))
        for form, result in zip(calls[use].forms, results, strict=True):
            if form is not None:
                dims = [evaluated(size, values) for size in form.shape]
                strides = [evaluated(step, values) for step in form.stride]
                _compare(calls[use].op.removesuffix(".default"), result, form.dtype, dims, strides)

    return compare


class CheckedOps(LightDispatchMode):
    """Raises ResultNotAsTraced for a custom op that returns another form than its fake kernel."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not is_custom(func):
            return func(*args, **given)
        told = None
        with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, (args, given))
            told = tensors_in(func(*fakes[0], **fakes[1]))  # a form that depends on data is none
        result = func(*args, **given)
        for one, other in zip(tensors_in(result), told or (), strict=told is not None):
            dims, strides = list(other.shape), list(other.stride())
            _compare(op_name(func), one, dtype_name(other.dtype), dims, strides)
        return result


def _compare(op: str, result: Any, dtype: str, dims: Any, strides: Any) -> None:
    """The stride of a dimension of one element, or of no elements, is any."""
    got, now = dtype_name(result.dtype), list(result.shape)
    if got != dtype or now != dims:
        raise _refused(op, f"{got}{now}", f"{dtype}{dims}")
    matter = [size != 1 and result.numel() for size in now]
    steps = [step if each else 0 for step, each in zip(result.stride(), matter, strict=True)]
    if steps != [step if each else 0 for step, each in zip(strides, matter, strict=True)]:
        raise _refused(op, f"strides {list(result.stride())}", f"strides {strides}")


def _refused(op: str, got: str, told: str, where: str | None = None) -> ResultNotAsTraced:
    """At the line of the op, or of its fake kernel."""
    code = getattr(fake_function(op), "__code__", None)
    if where is None and code is not None:
        where = f"{code.co_filename}:{code.co_firstlineno}"
    return ResultNotAsTraced(where=where, op=op, got=got, told=told)
