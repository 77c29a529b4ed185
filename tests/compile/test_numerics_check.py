"""A compiled piece against its graph, where memory is left for a splitting op to fill."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.fx import symbolic_trace

from piecegraph import Config
from piecegraph.compile.guards.numerics_check import numeric_difference
from piecegraph.compile.guards.tolerance import compare, excess
from piecegraph.config import compile_config
from piecegraph.tools.bisect.pieces import debug_pieces


def piece(x):
    """Like the code before vLLM's attention: the allocation is viewed, half of it is written."""
    output = torch.empty(4, 6, dtype=x.dtype, device=x.device).view(4, 2, 3)
    output[:, 0].copy_(x)
    return x + 1, output


def graph():
    made = symbolic_trace(piece)
    (node,) = made.graph.find_nodes(op="placeholder")
    node.meta["example_value"] = torch.empty(4, 3)
    return made


def compiled(left, written):
    def run(args):
        (x,) = args
        output = torch.full((4, 2, 3), left)
        output[:, 0] = x + written
        return x + 1, output

    return run


def test_memory_that_nobody_wrote_is_not_compared():
    assert numeric_difference(compiled(float("nan"), 0.0), graph(), {}) is None
    assert numeric_difference(compiled(7.0, 0.0), graph(), {}) is None


def test_what_was_written_there_is_compared():
    assert "result 1 is off by" in numeric_difference(compiled(7.0, 0.5), graph(), {})


class Handled(torch.nn.Module):
    """An op of an engine follows `handle` as an address, and takes `table` as it is."""

    def __init__(self):
        super().__init__()
        self.register_buffer("handle", torch.tensor(7))
        self.register_buffer("table", torch.tensor([5, 6]))

    def forward(self, x):
        return x * self.handle + self.table


@pytest.mark.compile
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
def test_a_handle_of_the_model_has_its_own_value():
    config = compile_config(Config(inputs={"x": "float32[num_tokens, 2]"}, max_num_tokens=8))
    ((piece,),) = debug_pieces(Handled(), config, torch.device("cpu"))
    values = piece.generated_inputs(piece.sizes(config, 3))
    whole = {str(each.tolist()) for each in values if getattr(each, "dtype", None) is torch.int64}
    assert whole == {"7", "[0, 0]"}


def test_a_splitting_op_inside_is_not_run(monkeypatch):
    """It may need a running step; a constant stands for what it returns. In a thread that serves
    meanwhile the op itself is called."""
    from . import ops

    monkeypatch.setattr(ops, "_mix", None)
    fresh = torch.ops.piecegraph_test.fresh
    made = symbolic_trace(lambda x: (fresh(x.sin(), "a") * x,))
    (node,) = made.graph.find_nodes(op="placeholder")
    node.meta["example_value"] = torch.empty(4, 3)
    cut_at = ("piecegraph_test::fresh",)
    for added, wrong in ((0.0, False), (1.0, True)):

        def code(args, added=added):
            with ThreadPoolExecutor(1) as serving, pytest.raises(TypeError, match="not callable"):
                serving.submit(fresh.default, args[0], "a").result()
            return [fresh.default(args[0], "a") * (args[0] + added)]

        assert (numeric_difference(code, made, {}, cut_at) is not None) is wrong


def test_equal_scores_may_be_taken_the_other_way_round():
    """In bfloat16 both are 1; code that leaves the rounding out sees which one is larger."""
    rows, way = torch.randn(64, 8, dtype=torch.bfloat16), torch.tensor([1.0, -1.0]).bfloat16()

    def model():
        scores = 1 + torch.full((64, 2), 1e-3, dtype=torch.bfloat16)
        return rows * way[scores.softmax(-1).argmax(-1)][:, None]

    assert excess(model(), -rows, model) is None
    assert excess(model(), -rows * 40, model) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_whole_numbers_in_floats_are_not_rounded(dtype):
    """Counts decide where rows lie, as of experts: with one less than there are, all is noise."""
    rows, ids = torch.randn(64, 8, dtype=dtype), torch.arange(64) % 4

    def model():
        counts = torch.histc(ids.float(), 4, 0, 3).to(dtype)
        counted = torch.zeros(4, dtype=dtype).index_add_(0, ids, torch.ones(64, dtype=dtype))
        starts = (counts.cumsum(0) - counted).int()
        return rows * (starts == torch.arange(4) * 16).all()

    assert model().any()
    assert excess(model(), model() * 1.5, model) is not None


@pytest.mark.parametrize("added", [1e-3, torch.full((64, 2), 1e-3, dtype=torch.bfloat16)])
def test_what_was_rounded_to_whole_numbers_is_rounded_otherwise(added):
    rows, way = torch.randn(64, 8, dtype=torch.bfloat16), torch.tensor([1.0, -1.0]).bfloat16()

    def model(in_place=False):
        scores = torch.ones(64, 2, dtype=torch.bfloat16)
        scores = scores.add_(added) if in_place else scores + added
        return rows * way[scores.argmax(-1)][:, None]

    for run in (model, lambda: model(in_place=True)):
        assert excess(run(), -rows, run) is None


def rows_elsewhere():
    """Rows lie where a rounded sum says, so that no bound is measured."""
    rows, parts = torch.arange(1.0, 65)[:, None] * torch.ones(8), torch.full((4,), 0.25)
    return rows * torch.where(parts.sum() == 1, 1.0, torch.nan)


def a_choice():
    """The number of an expert is an integer of the results, or that of tokens a shape."""
    return (torch.full((64, 2), 1.0) * 0.1).argmax(-1)


def a_shape():
    scores = torch.full((64,), 1.0) * 0.1
    return torch.arange(64.0)[scores >= scores.max(), None]


def all_moved():
    rows, way = torch.ones(64, 8).bfloat16(), torch.tensor([1.0, -1.0]).bfloat16()
    scores = 1 + torch.full((64, 2), 1e-3, dtype=torch.bfloat16)
    return rows * way[scores.softmax(-1).argmax(-1)][:, None]


@pytest.mark.parametrize("model", [rows_elsewhere, a_choice, a_shape, all_moved])
def test_what_rounding_alone_makes_any_result_proves_none(model):
    """Any result was within a tolerance without bound, and proved."""
    assert not model().isnan().any()
    assert compare(model(), model(), model) is None
    wrong = -model() - 1
    assert compare(model(), wrong, model).unknown
    assert excess(model(), wrong, model) is None


def test_one_row_in_ten_may_have_another_expert():
    def model():
        return torch.cat([all_moved()[:1], torch.ones(9, 8).bfloat16()])

    other = model()
    other[0] *= -1
    assert compare(model(), other, model) is None
    other[5] *= -1
    assert not compare(model(), other, model).unknown
