"""Plans written by hand."""

from piecegraph.compile.ir.plan import (
    CallStep,
    CompiledRange,
    Constant,
    GuardCheck,
    PieceStep,
    Plan,
    PlanPiece,
    Result,
    Symbol,
    UserInput,
    Weight,
)
from piecegraph.compile.ir.serialization import Ref, encode

from . import ops as _registers  # noqa: F401


def small_plan(steps, *results):
    """A plan with one input, one symbol, one weight and the given steps."""
    return Plan(
        inputs=(
            UserInput(name="i0", path=("x", 0), dtype="float32", device="cpu", shape=("s0", 8)),
        ),
        constants=(Constant(path=("mode",), value=encode(float("inf"))),),
        weights=(Weight(name="w0", target="a.b", dtype="float32", shape=(8,), stride=(1,)),),
        symbols=(Symbol(name="s0", label="num_tokens", source="i0", dim=0, low=1, high=9),),
        pieces=(PlanPiece(digest="d", nodes=3, sizes=(1,)),),
        ranges=(CompiledRange(low=1, high=9, artifacts=(0,)),),
        steps=tuple(steps),
        results=tuple(Result(name=name, dtype="float32", shape=("s0", 8)) for name in results),
        structure=encode((Ref("o0"), 3, {"a": None})),
        checks=(GuardCheck(expression="num_tokens % 8 == 0", where="model.py:3"),),
        parameters=("x", "mode"),
    )


def piece(*args, outs, index=0):
    return PieceStep(piece=index, args=args, outs=outs)


def call(op, *args, outs=(), unpack=False, **kwargs):
    return CallStep(
        op=f"piecegraph_test::{op}",
        args=[encode(arg) for arg in args],
        kwargs={name: encode(arg) for name, arg in kwargs.items()},
        outs=outs,
        unpack=unpack,
    )
