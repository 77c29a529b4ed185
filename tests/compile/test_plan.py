"""The plan is data: it survives JSON, and refuses what it does not know."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from piecegraph.compile.literal import Expr, Ref, encode
from piecegraph.compile.plan import (
    CallStep,
    Check,
    CompiledSpan,
    Constant,
    PieceStep,
    Plan,
    Result,
    Symbol,
    UniquePiece,
    UserInput,
    Weight,
)

RESULT = Result(name="t9", dtype="float32", shape=("s0", 8))


def small_plan(steps, results=(RESULT,)) -> Plan:
    """A plan with one input, one symbol, one weight and the given steps."""
    return Plan(
        inputs=(
            UserInput(name="i0", path=("x", 0), dtype="float32", device="cpu", shape=("s0", 8)),
        ),
        constants=(Constant(path=("mode",), value=encode(float("inf"))),),
        weights=(Weight(name="w0", target="a.b", dtype="float32", shape=(8,), stride=(1,)),),
        symbols=(Symbol(name="s0", label="num_tokens", source="i0", dim=0, low=1, high=9),),
        pieces=(UniquePiece(digest="d", nodes=3, sizes=(1,)),),
        spans=(CompiledSpan(low=1, high=9, artifacts=(0,)),),
        steps=tuple(steps),
        results=results,
        structure=encode((Ref("o0"), 3, {"a": None})),
        checks=(Check(expression="num_tokens % 8 == 0", where="model.py:3"),),
        parameters=("x", "mode"),
    )


CALL = CallStep(
    op="piecegraph_test::mix.default",
    args=[encode(each) for each in (Ref("t0"), Expr("2*s0"), [1, slice(None, 3)], "layer")],
    kwargs={"out": encode(Ref("t1"))},
    outs=(),
    unpack=False,
)


def test_plan_survives_json():
    plan = small_plan([PieceStep(piece=0, args=("i0", "s0"), outs=("t0", "t1")), CALL])
    text = plan.model_dump_json()
    assert Plan.model_validate_json(text) == plan
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.update(more=1),
        lambda data: data["steps"][0].update(kind="other"),
        lambda data: data["steps"][0].pop("piece"),
        lambda data: data["inputs"][0].update(shape="text"),
    ],
)
def test_plan_of_another_form_is_refused(change):
    data = json.loads(small_plan([PieceStep(piece=0, args=(), outs=("t9",))]).model_dump_json())
    change(data)
    with pytest.raises(ValidationError):
        Plan.model_validate(data)


@pytest.mark.parametrize(
    ("kinds", "segments"),
    [("p", 1), ("pcp", 3), ("pccp", 3), ("c", 1), ("cpc", 3), ("pp", 2), ("", 0), ("ccpp", 3)],
)
def test_segments_are_pieces_and_runs_of_calls(kinds, segments):
    steps = [
        PieceStep(piece=0, args=(), outs=()) if kind == "p" else CALL.model_copy() for kind in kinds
    ]
    assert small_plan(steps, results=()).segments() == segments
