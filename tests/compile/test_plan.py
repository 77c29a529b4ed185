"""The plan is data: it survives JSON, and refuses what it does not know."""

import json

import pytest
from pydantic import ValidationError

from piecegraph.compile.ir.plan import Plan
from piecegraph.compile.ir.serialization import Expr, Ref

from .plans import call, piece, small_plan

CALL = call("mix.default", Ref("t0"), Expr("2*s0"), [1, slice(None, 3)], "layer", out=Ref("t1"))


def test_plan_survives_json():
    plan = small_plan([piece("i0", "s0", outs=("t0", "t1")), CALL], "t9")
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
    data = json.loads(small_plan([piece(outs=("t9",))], "t9").model_dump_json())
    change(data)
    with pytest.raises(ValidationError):
        Plan.model_validate(data)


@pytest.mark.parametrize(
    ("kinds", "segments"),
    [("p", 1), ("pcp", 3), ("pccp", 3), ("c", 1), ("cpc", 3), ("pp", 2), ("", 0), ("ccpp", 3)],
)
def test_segments_are_pieces_and_runs_of_calls(kinds, segments):
    steps = [piece(outs=()) if kind == "p" else CALL for kind in kinds]
    assert small_plan(steps).segments() == segments
