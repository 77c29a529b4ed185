"""Models that are wrong for some sizes are refused, with the line; right ones are not."""

from __future__ import annotations

import copy

import pytest
import torch

from piecegraph.compile.config import DynamicShapes, GuardPolicy
from piecegraph.errors import (
    CompileError,
    GuardBroken,
    GuardUnproved,
    ShapesDiffer,
    Specialised,
    TraceFailed,
)

from .size_models import SOUND, UNSOUND, SizeModel, heads, marked_line, multiple_of_128, squeezed

pytestmark = pytest.mark.compile

SHAPES = list(DynamicShapes)
INPUTS = {"x": "float32[num_tokens, 8]"}


def name(body):
    return body.__name__


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("body", UNSOUND, ids=name)
def test_failure_36_unsound_model_is_refused_with_its_line(compiled, body, shapes):
    with pytest.raises((GuardUnproved, Specialised, ShapesDiffer, TraceFailed)) as caught:
        compiled(SizeModel(body), inputs=INPUTS, dynamic_shapes=shapes)
    file, _, line = caught.value.where.partition(" in ")[0].rpartition(":")
    assert file.endswith("size_models.py")
    assert int(line) == marked_line(body)


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("body", SOUND, ids=name)
def test_sound_model_is_served_at_every_size(compiled, body, shapes):
    model = SizeModel(body)
    made = compiled(model, inputs=INPUTS, dynamic_shapes=shapes)
    for size in (1, 2, 3, 7, 64, 2048):
        x = torch.randn(size, 8)
        torch.testing.assert_close(made(x), model(x))


def test_there_are_enough_models():
    assert len(SOUND) + len(UNSOUND) >= 25


@pytest.mark.parametrize("shapes", [s for s in SHAPES if s is not DynamicShapes.UNBACKED])
def test_error_names_expression_and_sizes(compiled, shapes):
    with pytest.raises(GuardUnproved, match=r"Mod\(num_tokens, 128\).*128, 256, 384 \(16 in all"):
        compiled(SizeModel(multiple_of_128), inputs=INPUTS, dynamic_shapes=shapes)


def test_narrower_range_makes_the_same_model_sound(compiled):
    made = compiled(SizeModel(multiple_of_128), inputs=INPUTS, max_num_tokens=127)
    assert made.plan.checks == ()


def test_check_policy_tests_each_step(compiled):
    model = SizeModel(multiple_of_128)
    made = compiled(model, inputs=INPUTS, guards=GuardPolicy.CHECK)
    x = torch.randn(129, 8)
    torch.testing.assert_close(made(x), model(x))
    with pytest.raises(GuardBroken, match="128") as caught:
        made(torch.randn(256, 8))
    assert "size_models.py" in caught.value.where


def test_check_policy_refuses_the_size_at_which_shapes_differ(compiled):
    made = compiled(SizeModel(squeezed), inputs=INPUTS, guards=GuardPolicy.CHECK)
    assert made(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(GuardBroken):
        made(torch.randn(1, 8))


def test_drop_policy_serves_and_says_so(compiled):
    made = compiled(SizeModel(multiple_of_128), inputs=INPUTS, guards=GuardPolicy.DROP)
    assert made.plan.checks == ()
    assert made.events.named("guard.dropped")
    made(torch.randn(128, 8))


def test_layout_question_about_a_size_of_one_is_answered_by_unbacked_sizes(compiled):
    made = compiled(SizeModel(heads), inputs=INPUTS)
    (event,) = made.events.named("trace.unbacked")
    assert "Ne(num_tokens, 1)" in event.facts["reason"]


def test_every_error_survives_a_copy(compiled):
    with pytest.raises(CompileError) as caught:
        compiled(SizeModel(squeezed), inputs=INPUTS)
    assert str(copy.copy(caught.value)) == str(caught.value)


@pytest.mark.parametrize("shapes", SHAPES)
def test_unbacked_pieces_hold_no_assertions(compiled, shapes):
    made = compiled(SizeModel(linear_twice), inputs=INPUTS, dynamic_shapes=shapes)
    assert made.plan.pieces[0].nodes <= 8


def linear_twice(m, x):
    return m.linear(m.linear(x))
