"""`guards="split"`: one trace for each interval of token counts on which its guards hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from piecegraph.compile.guards.trace_with_guards import trace_with_guards
from piecegraph.compile.ir.compilation import Compiler
from piecegraph.compile.ir.config import DynamicShapes
from piecegraph.compile.pipeline import compile_model
from piecegraph.compile.verify import trace_difference
from piecegraph.errors import GuardUnproved, HostRead, IntervalsDiffer, UnknownSplittingOp
from piecegraph.torch_compat.basics.symbolic import statically_true
from tests import text_compiler
from tests.text_compiler import compile_text, load_texts, use_text_compiler

from . import size_models
from .models import MIX, Body, X, assert_right, marked_line, place
from .size_models import MARK, heads, multiple_of_128
from .starts import request_of
from .test_guarded_models import OfRequests

pytestmark = pytest.mark.compile

SPLIT = {"guards": "split"}
BOUNDARIES = (1, 2, 7, 8, 9, 10, 63, 64, 65, 66, 2047, 2048)


class Tiled(nn.Module):
    """A tile table between two layers that are the same for all sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, x):
        y = self.up(x).sin()
        out = torch.empty_like(y)
        torch.ops.piecegraph_test.mix(y, out, "first")
        m = x.shape[0]
        tile = 1 if m <= 8 else 2 if m <= 64 else 4
        y = torch.cat([out[:, :4] * tile, out[:, 4:]], 1)
        out = torch.empty_like(y)
        torch.ops.piecegraph_test.mix(y, out, "second")
        return self.down(out).cos()


def spans(made):
    return [(plan.ranges[0].low, plan.ranges[-1].high) for plan in made.plan.intervals()]


def check(made, model, sizes=BOUNDARIES):
    assert_right(made, model, sizes)


def test_a_tile_table_has_one_trace_for_each_of_its_rows(compiled):
    model = Tiled()
    made = compiled(model, inputs=X, splitting_ops=MIX, tracing=SPLIT)
    assert spans(made) == [(1, 8), (9, 64), (65, 2048)]
    assert (made.plan.symbols[0].low, made.plan.symbols[0].high) == (1, 2048)
    assert made.events.counters["dynamo_traces"] == 3
    assert all(guard.proved for plan in made.plan.intervals() for guard in plan.guards)
    check(made, model)


def test_a_model_without_such_a_choice_has_one_trace(compiled):
    model = Body(lambda m, x: m.linear(x))
    made = compiled(model, inputs=X, tracing=SPLIT)
    assert made.plan.others == ()
    assert made.events.counters["dynamo_traces"] == 1


def start(model, folder, monkeypatch, **settings):
    """A start with a compiler that keeps artifacts, and its request."""
    use_text_compiler(monkeypatch)
    given = {"splitting_ops": MIX, "max_num_tokens": 2048, "tracing": SPLIT, **settings}
    request = request_of(model, folder, **given)
    torch._dynamo.reset()
    return compile_model(request), request


def test_equal_pieces_of_several_traces_are_compiled_once(tmp_path, monkeypatch):
    made, request = start(Tiled(), tmp_path, monkeypatch)
    digests = [[piece.digest for piece in plan.pieces] for plan in made.plan.intervals()]
    shared = set.intersection(*map(set, digests))
    assert [len(each) for each in digests] == [3, 3, 3]
    assert len(shared) == 2
    assert len(request.events.named("compile.end")) == len(made.pieces) == 5
    stored = {tuple(map(tuple, e.meta["ranges"])) for e in request.cache.stored("artifact")}
    assert stored == {((1, 2048),), ((1, 8),), ((9, 64),), ((65, 2048),)}


def test_pieces_are_compiled_without_what_one_trace_knows_of_its_sizes(tmp_path, monkeypatch):
    """A piece that all traces have is compiled from one, and serves the sizes of the others."""
    known = []

    def compile_piece(graph, inputs, options):
        shapes = [each.shape for each in inputs if isinstance(each, torch.Tensor)]
        size = next(n for shape in shapes for n in shape if isinstance(n, torch.SymInt))
        known.extend(fact for fact in (size > 64, size > 8, size < 65) if statically_true(fact))
        return compile_text(graph, inputs, options)

    compiler = Compiler("text", compile_piece, load_texts, version="1")
    monkeypatch.setattr(text_compiler, "TEXT", compiler)
    start(Tiled(), tmp_path, monkeypatch)
    assert known == []


LIMITS = pytest.mark.needs_torch(
    "2.12", "unbacked sizes of torch 2.11 have no limits: one interval more, or GuardUnproved"
)


def asks_the_layout(m, x):
    """Only with unbacked sizes torch does not ask whether there is one token."""
    y = m.linear(heads(m, x).reshape(-1, 8))
    return y * 2 if x.shape[0] <= 8 else y


@LIMITS
@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(each, marks=[pytest.mark.heavy] * (each is not DynamicShapes.UNBACKED))
        for each in DynamicShapes
    ],
)
def test_a_trace_may_need_unbacked_sizes(compiled, shapes):
    model = Body(asks_the_layout)
    made = compiled(model, inputs=X, tracing={**SPLIT, "dynamic_shapes": shapes})
    assert spans(made) == [(1, 8), (9, 2048)]
    check(made, model)


def of_table(table):
    """A model that scales rows by the first number whose bound is not exceeded."""

    def scaled(m, x):
        rows = x.shape[0]
        for bound, number in table:
            if rows <= bound:
                return m.linear(x) * number
        return m.linear(x)

    return Body(scaled)


def test_verification_compares_each_trace(tmp_path, monkeypatch):
    made, request = start(of_table([(8, 2.0), (64, 3.0)]), tmp_path, monkeypatch, splitting_ops=())
    assert trace_difference(request, made.plan) is None
    for table, difference in (
        ([(8, 2.0), (64, 3.5)], "* 3.5"),
        ([(8, 2.5), (64, 3.0)], "* 2.5"),
        ([(8, 2.0)], "it has 3 traces, the model has 2 now"),
        ([(8, 2.0), (32, 3.0)], "high=32 now"),
    ):
        found = trace_difference(replace(request, model=of_table(table)), made.plan)
        assert difference in str(found)


def single(m, x):
    return x * 2 if x.shape[0] == 1 else m.linear(x)


def one_in_the_middle(m, x):
    return x * 2 if x.shape[0] == 4 else m.linear(x)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (single, [(1, 1), (2, 2048)]),
        (one_in_the_middle, [(1, 3), (4, 4), (5, 2048)]),
        (multiple_of_128, [(1, 127), (128, 128), (129, 255), (256, 256), (257, 300)]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_interval_may_be_one_size(compiled, body, expected):
    model = Body(body)
    made = compiled(model, inputs=X, max_num_tokens=expected[-1][1], tracing=SPLIT)
    assert spans(made) == expected
    check(made, model, [size for span in expected for size in span])


def test_too_many_intervals_are_refused_with_the_line(compiled):
    with pytest.raises(GuardUnproved, match="at most 8 intervals of num_tokens") as caught:
        compiled(Body(multiple_of_128), inputs=X, tracing=SPLIT)
    assert place(caught.value) == (size_models.__file__, marked_line(multiple_of_128, MARK))


def test_a_guard_on_another_size_is_refused_as_by_prove(compiled):
    inputs = {**X, "starts": "int64[num_reqs]"}
    limits = {"symbol_limits": {"num_reqs": (1, 8)}}
    said = set()
    for policy in ("prove", "split"):
        with pytest.raises(GuardUnproved, match="num_reqs") as caught:
            compiled(OfRequests(), inputs=inputs, tracing={**limits, "guards": policy})
        said.add(str(caught.value))
    assert len(said) == 1


def test_examples_of_the_caller_are_cut_and_repeated(compiled):
    model = of_table([(8, 2.0), (64, 3.0)])
    made = compiled(model, inputs=X, examples=((torch.randn(20, 8),), {}), tracing=SPLIT)
    assert spans(made) == [(1, 8), (9, 64), (65, 2048)]
    check(made, model)


def test_compile_ranges_and_sizes_are_cut_at_the_intervals(compiled):
    model = of_table([(8, 2.0), (64, 3.0)])
    codegen = {"ranges": (4, 16, 64, 512), "sizes": (8, 100)}
    made = compiled(model, inputs=X, codegen=codegen, tracing=SPLIT)
    ranges = [(r.low, r.high) for plan in made.plan.intervals() for r in plan.ranges]
    assert ranges == [
        *((1, 4), (5, 7), (8, 8), (9, 16), (17, 64)),
        *((65, 99), (100, 100), (101, 512), (513, 2048)),
    ]
    check(made, model, [size for span in ranges for size in span])


def by_size(few, many, most):
    """A model that runs `few` up to `most` tokens, and `many` above."""
    return Body(lambda m, x: (few if x.shape[0] <= most else many)(m.linear(x)))


@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("policy", ["split", "prove"])
@pytest.mark.parametrize("swap", [False, True])
def test_a_splitting_op_need_not_be_in_each_trace(compiled, swap, policy, most):
    ops = [lambda x: torch.ops.piecegraph_test.fresh(x, "a") + 1, lambda x: x * 2]
    model = by_size(*(ops[::-1] if swap else ops), most)
    names = ("piecegraph_test::fresh",)
    made = compiled(model, inputs=X, splitting_ops=names, tracing={"guards": policy})
    assert spans(made) == [(1, most), (most + 1, 2048)]
    calls = [len(plan.calls()) for plan in made.plan.intervals()]
    assert calls == ([0, 1] if swap else [1, 0])
    check(made, model)


@pytest.mark.parametrize("policy", ["split", "prove"])
def test_a_splitting_op_that_no_trace_has_is_unknown(compiled, policy):
    fresh, tagged = torch.ops.piecegraph_test.fresh, torch.ops.piecegraph_test.log.tagged
    model = by_size(lambda x: fresh(x, "a"), lambda x: tagged(x, tag="b"), 8)
    known = "piecegraph_test::fresh, piecegraph_test::log"
    with pytest.raises(UnknownSplittingOp, match=f"'no::such' .*: {known}"):
        compiled(model, inputs=X, splitting_ops=("no::such",), tracing={"guards": policy})


def read_alone(m, x):
    if x.shape[0] == 1:
        return x * x.sum().item()
    return m.linear(x)


@pytest.mark.parametrize("policy", ["split", "prove"])
def test_what_keeps_one_interval_from_being_traced_is_shown(compiled, policy):
    with pytest.raises(HostRead, match="item") as caught:
        compiled(Body(read_alone), inputs=X, tracing={"guards": policy})
    assert place(caught.value) == (__file__, read_alone.__code__.co_firstlineno + 2)


def test_an_error_of_another_way_to_trace_is_an_event(tmp_path):
    """That of the first way is raised."""
    request = request_of(of_table([(n, float(n)) for n in range(2, 22, 2)]), tmp_path)
    with pytest.raises(GuardUnproved, match="num_tokens > 2,"):
        trace_with_guards(request)
    (split,), (unbacked,) = map(request.events.named, ("trace.not_split", "trace.not_unbacked"))
    assert "at most 8 intervals" in split.facts["reason"]
    assert "cannot be traced" in unbacked.facts["reason"]


class TwoInputs(nn.Module):
    """Reads its inputs in another order for few rows."""

    def __init__(self, both=True):
        super().__init__()
        self.both = both

    def forward(self, x, y):
        if x.shape[0] <= 8:
            return y * 2 - x if self.both else y * 2
        return x - y if self.both else x + 0


TWO = {"x": "float32[num_tokens, 8]", "y": "float32[num_tokens, 8]"}


def test_inputs_are_passed_in_the_order_of_each_trace(compiled):
    model = TwoInputs()
    made = compiled(model, inputs=TWO, tracing=SPLIT)
    for size in (1, 8, 9):
        x, y = torch.randn(size, 8), torch.randn(size, 8)
        assert torch.equal(made(x, y), model(x, y))


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        pytest.param(
            TwoInputs(both=False),
            TWO,
            "1 to 8 tokens has other inputs: 'y' is read by these sizes",
            marks=LIMITS,
        ),
        (
            Body(lambda m, x: x[:, :4] + 1 if x.shape[0] <= 8 else x * 2),
            X,
            "1 to 8 tokens has other results",
        ),
        (
            Body(lambda m, x: (x + 1,) if x.shape[0] <= 8 else x * 2),
            X,
            "1 to 8 tokens has other results",
        ),
    ],
)
def test_traces_of_another_form_are_refused(compiled, model, inputs, said):
    with pytest.raises(IntervalsDiffer, match=said):
        compiled(model, inputs=inputs, tracing=SPLIT)


class Counting(nn.Module):
    """Writes to buffers that are its own for each interval."""

    def __init__(self):
        super().__init__()
        self.register_buffer("few", torch.zeros(8))
        self.register_buffer("many", torch.zeros(8))

    def forward(self, x):
        (self.few if x.shape[0] <= 8 else self.many).add_(x.sum(0))
        return x + self.few + self.many


def test_weights_of_all_traces_are_bound(compiled):
    model, plain = Counting(), Counting()
    made = compiled(model, inputs=X, tracing=SPLIT)
    assert {w.target: w.written for w in made.plan.weights} == {"few": True, "many": True}
    assert_right(made, plain, (3, 20, 8, 9))
    torch.testing.assert_close(model.few, plain.few)
