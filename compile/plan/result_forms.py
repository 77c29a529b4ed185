"""What ops return and write is compared with what the trace was told.

A piece is compiled for the form that the fake kernel of an op said: of another dtype it would read
other bits, of another shape or strides other elements. The results of splitting ops are compared
when code first runs at a size, those of ops inside a piece when it is run under `CheckedOps`: by
trials of the piece, in a run of its own of the first dummy batch of a kind, and in the first step
of code without a graph.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ...errors import ResultNotAsTraced
from ...torch_compat.basics.ops import fake_function, is_distributed, op_name, returns_new_memory
from ...torch_compat.basics.tensors import (
    FakeTensorMode,
    LightDispatchMode,
    as_bytes,
    is_wrapper_subclass,
    storage_id,
    tree_map_only,
)
from ..ir.locations import op_line
from ..ir.ops import is_custom, tensors_in, written_by
from ..ir.plan import Plan, evaluated
from ..ir.serialization import dtype_name
from .codegen import AfterCall, StepFn
from .compiled_model import CompiledModel, Hooks

_FAILED_OP = re.compile(r"Error in op: (?:torch\.ops\.)?(\w+)\.(\w+)")
"""In an assertion of Inductor's code, whose first line says what differs."""

_FOREIGN_OP = re.compile(r"torch\.ops\.(?!aten\.|prims\.|higher_order\.)(\w+)\.(\w+)")

_COMMENT = re.compile("#.*")
"""Of a piece: the user's line, which may call operators of other pieces, too."""

_MOST_BYTES = 16 << 20
"""Of an argument whose content is compared."""


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
                told = "its fake kernel told the trace another one"
                raise _refused(
                    "::".join(found.groups()), f"returned {fact}", told, where
                ) from error
            raise

    return checked


def is_checked(plan: Plan) -> bool:
    """Whether there are results to compare: of splitting ops, or of others' ops in a piece."""
    intervals = plan.intervals()
    return bool(foreign_ops(plan)) or any(any(c.forms) for each in intervals for c in each.calls())


def foreign_ops(plan: Plan) -> frozenset[str]:
    """The operators in pieces that are not torch's own, as `ns::op`."""
    texts = [_COMMENT.sub("", piece.text) for each in plan.intervals() for piece in each.pieces]
    return frozenset("::".join(name) for text in texts for name in _FOREIGN_OP.findall(text))


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
    """Raises ResultNotAsTraced for a custom op that returns another form than its fake kernel, or
    writes to an argument that its schema does not name as written.

    The ops `inside` compiled code may return no memory of an argument either: to a compiler that
    is free after its last use, and a write to one is none to the other.
    """

    def __init__(self, inside: Collection[str] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._inside = inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not is_custom(func) or is_distributed(func):
            return func(*args, **given)
        told = None
        with suppress(Exception), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = tree_map_only(Tensor, mode.from_tensor, (args, given))
            told = tensors_in(func(*fakes[0], **fakes[1]))  # a form that depends on data is none
        before = _unwritten(func, args, given)
        result, op = func(*args, **given), op_name(func)
        for one, other in zip(tensors_in(result), told or (), strict=told is not None):
            dims, strides = list(other.shape), list(other.stride())
            _compare(op, one, dtype_name(other.dtype), dims, strides)
        if not all(torch.equal(as_bytes(tensor), held) for tensor, held in before):
            raise _refused(op, "wrote to an argument", "its schema does not say so")
        if op in self._inside and returns_new_memory(func):
            places = [storage_id(tensor) for tensor in tensors_in((args, given)) if tensor.numel()]
            for one in tensors_in(result):
                if one.numel() and {storage_id(one), one.data_ptr()}.intersection(places):
                    raise _refused(op, "returned memory that it was given", "its schema says new")
                places.append(one.data_ptr())
        return result


def _unwritten(func: Any, args: Any, kwargs: Any) -> list[tuple[Tensor, Tensor]]:
    """The arguments that the schema does not name as written, and what they hold."""
    written = {storage_id(tensor) for tensor in written_by(func, args, kwargs)}
    tensors = [t for t in tensors_in((args, kwargs)) if t.layout is torch.strided]
    plain = [t for t in tensors if not is_wrapper_subclass(t) and t.nbytes <= _MOST_BYTES]
    return [(t, as_bytes(t).clone()) for t in plain if storage_id(t) not in written]


def _compare(op: str, result: Any, dtype: str, dims: Any, strides: Any) -> None:
    """The stride of a dimension of one element, or of no elements, is any."""
    got, now = dtype_name(result.dtype), list(result.shape)
    if got != dtype or now != dims:
        told = f"its fake kernel told the trace {dtype}{dims}"
        raise _refused(op, f"returned {got}{now}", told)
    matter = [size != 1 and result.numel() for size in now]
    steps = [step if each else 0 for step, each in zip(result.stride(), matter, strict=True)]
    if steps != [step if each else 0 for step, each in zip(strides, matter, strict=True)]:
        told = f"its fake kernel told the trace strides {strides}"
        raise _refused(op, f"returned strides {list(result.stride())}", told)


def _refused(op: str, got: str, told: str, where: str | None = None) -> ResultNotAsTraced:
    """At the line of the op, or of its fake kernel."""
    code = getattr(fake_function(op), "__code__", None)
    if where is None and code is not None:
        where = f"{code.co_filename}:{code.co_firstlineno}"
    return ResultNotAsTraced(where=where, op=op, got=got, told=told)
