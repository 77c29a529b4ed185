"""Models that are wrong for some sizes are refused, with the line; right ones are not."""

import types

import pytest
import torch

from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir import registered_compilers as registry
from piecegraph.compile.ir.config import DynamicShapes, GuardPolicy
from piecegraph.compile.verify import trace_difference
from piecegraph.errors import GuardBroken, GuardUnproved, ShapesDiffer, Specialized, TraceFailed
from tests.text_compiler import compile_text, load_texts

from . import size_models
from .models import Body, X, assert_right, marked_line, place
from .size_models import CHOOSING, MARK, SOUND, UNSOUND, heads, multiple_of_128, squeezed
from .starts import request_of

pytestmark = pytest.mark.compile

HEAVY = pytest.mark.heavy

DEFAULT = DynamicShapes.BACKED_SIZE_OBLIVIOUS
SHAPES = [DEFAULT, *(pytest.param(s, marks=HEAVY) for s in DynamicShapes if s is not DEFAULT)]


def name(body):
    return body.__name__


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("body", UNSOUND, ids=name)
def test_failure_36_unsound_model_is_refused_with_its_line(compiled, body, shapes):
    with pytest.raises((GuardUnproved, Specialized, ShapesDiffer, TraceFailed)) as caught:
        compiled(Body(body), inputs=X, tracing={"dynamic_shapes": shapes})
    assert place(caught.value) == (size_models.__file__, marked_line(body, MARK))


EACH_TIME = ("first_half", "at_most_four", "all_but_five", "six_rows", "padded", "heads")
EACH_TIME += ("last_row", "rounded_up", "true_for_all", "below_the_limit", "chosen_by_data")


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(
    "body",
    [pytest.param(b, marks=[HEAVY] * (b.__name__ not in EACH_TIME)) for b in SOUND],
    ids=name,
)
def test_sound_model_is_served_at_every_size(compiled, body, shapes):
    model = Body(body)
    made = compiled(model, inputs=X, tracing={"dynamic_shapes": shapes})
    assert_right(made, model, (1, 2, 3, 7, 64, 2048))


@pytest.mark.parametrize("shapes", [DynamicShapes.BACKED, DEFAULT])
@pytest.mark.parametrize("body", CHOOSING, ids=name)
def test_a_choice_by_a_small_size_has_a_trace_for_each_way(compiled, body, shapes):
    model = Body(body)
    made = compiled(model, inputs=X, tracing={"dynamic_shapes": shapes})
    assert [trace.ranges[0].low for trace in made.plan.traces()] == [1, 2]
    assert_right(made, model, (1, 2, 3, 64, 2048))


@pytest.mark.parametrize("shapes", [s for s in DynamicShapes if s is not DynamicShapes.UNBACKED])
def test_error_names_expression_and_sizes(compiled, shapes):
    with pytest.raises(GuardUnproved, match=r"Mod\(num_tokens, 128\).*128, 256, 384 \(16 in all"):
        compiled(Body(multiple_of_128), inputs=X, tracing={"dynamic_shapes": shapes})


class OfRequests(torch.nn.Module):
    def forward(self, x, starts):
        return x * 2 + starts.sum() if starts.shape[0] > 3 else x


def test_a_guard_on_another_size_is_no_reason_to_pad_tokens(compiled):
    inputs = {**X, "starts": "int64[num_reqs]"}
    limits = {"num_reqs": (1, 8)}
    with pytest.raises(GuardUnproved, match=r"symbol_limits=\{'num_reqs': \(4, 8\)\}"):
        compiled(OfRequests(), inputs=inputs, tracing={"symbol_limits": limits})


def test_narrower_range_makes_the_same_model_sound(compiled):
    made = compiled(Body(multiple_of_128), inputs=X, max_num_tokens=127)
    assert made.plan.checks == ()


def test_check_policy_tests_each_step(compiled):
    model = Body(multiple_of_128)
    made = compiled(model, inputs=X, tracing={"guards": GuardPolicy.CHECK})
    assert_right(made, model, [129])
    with pytest.raises(GuardBroken, match="128") as caught:
        made(torch.randn(256, 8))
    assert "size_models.py" in caught.value.where


def test_check_policy_refuses_the_size_at_which_shapes_differ(compiled):
    made = compiled(Body(squeezed), inputs=X, tracing={"guards": GuardPolicy.CHECK})
    assert made(torch.randn(2, 8)).shape == (2, 8)
    with pytest.raises(GuardBroken):
        made(torch.randn(1, 8))


def test_drop_policy_serves_and_says_so(compiled):
    made = compiled(Body(multiple_of_128), inputs=X, tracing={"guards": GuardPolicy.DROP})
    assert made.plan.checks == ()
    assert made.events.named("guard.dropped")
    made(torch.randn(128, 8))


def test_layout_question_about_a_size_of_one_is_answered_by_unbacked_sizes(compiled):
    made = compiled(Body(heads), inputs=X)
    (event,) = made.events.named("trace.unbacked")
    assert "Ne(num_tokens, 1)" in event.facts["reason"]


@pytest.mark.parametrize("shapes", SHAPES)
def test_unbacked_pieces_hold_no_assertions(compiled, shapes):
    made = compiled(Body(linear_twice), inputs=X, tracing={"dynamic_shapes": shapes})
    assert made.plan.pieces[0].nodes <= 8


def linear_twice(m, x):
    return m.linear(m.linear(x))


class Convolution(torch.nn.Module):
    """As short convolutions of hybrid models: padded on both sides, cut to the tokens."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(8, 8, 3, groups=8, padding=2, bias=False)

    def forward(self, x):
        first, second = torch.cat([x, x], 1)[None].transpose(-1, -2).chunk(2, dim=-2)
        mixed = self.conv(first * 2)[..., : x.shape[0]]
        return (second * mixed).transpose(-1, -2).contiguous()[0] + x


@pytest.mark.needs_torch(
    "2.12", "torch 2.11 cannot trace a convolution with unbacked sizes and pads without a try"
)
def test_a_piece_that_cannot_be_compiled_with_unbacked_sizes_is_two_pieces(compiled, monkeypatch):
    """Inductor cannot lay out this convolution if it may not compare its length."""
    seen = []

    def compile_backed(graph, inputs, options):
        symbols = [str(value) for value in inputs if isinstance(value, torch.SymInt)]
        seen.append(symbols)
        if any(symbol.startswith("u") for symbol in symbols):
            raise RuntimeError("data-dependent expression")
        return compile_text(graph, inputs, options)

    compiler = Compiler("text", compile_backed, load_texts, version="1")
    entry = types.SimpleNamespace(name="text", load=lambda: compiler)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    model = Convolution().requires_grad_(False)
    made = compiled(model, inputs=X, compiler="text")
    assert [symbols[:1] == ["u0"] for symbols in seen] == [True, False, False]
    assert [trace.ranges[0].low for trace in made.plan.traces()] == [1, 2]
    assert_right(made, model, (1, 2, 3, 7, 64))
    request = request_of(model, max_num_tokens=2048)
    assert trace_difference(request, made.plan) is None  # a verification finds no other


@pytest.mark.parametrize(
    ("holds", "wrong_at_one", "says"),
    [
        (lambda size: size != 1, False, None),
        (lambda size: size != 1, True, r"1 \(1 in all; run at .*: result 0 is off by 1\)"),
        (lambda size: size % 128 != 0, False, r"128, 256, 384 \(16 in all\)"),
    ],
    ids=["right where it fails", "wrong where it fails", "fails at more sizes than are run"],
)
def test_a_guard_of_a_compiler_is_decided_by_running_its_code(
    compiled, monkeypatch, holds, wrong_at_one, says
):
    """The error says what the run gave, by which a device that computes nothing is known."""

    def compile_asking(graph, inputs, options):
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        sizes = [size for each in tensors for size in each.shape if isinstance(size, torch.SymInt)]
        assert holds(sizes[0])
        finish = compile_text(graph, inputs, options)

        def wrong():
            fn, blobs = finish()
            return lambda args: [each + (len(each) == 1) for each in fn(args)], blobs

        return wrong if wrong_at_one else finish

    compiler = Compiler("text", compile_asking, None, version="1")
    entry = types.SimpleNamespace(name="text", load=lambda: compiler)
    monkeypatch.setattr(registry, "entry_points", lambda group: [entry])
    if says:
        with pytest.raises(GuardUnproved, match=says):
            compiled(Body(linear_twice), inputs=X, compiler="text")
    else:
        made = compiled(Body(linear_twice), inputs=X, compiler="text")
        (guard,) = [each.facts for each in made.events.named("guard") if "1" in str(each.facts)]
        assert (guard["proved"], guard["method"]) == (True, "run at the sizes it fails for")
