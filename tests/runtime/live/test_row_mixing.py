"""Models in which padding would reach real rows are found, and their batches never padded."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as collectives

from piecegraph import Config, prepare
from piecegraph.compile.guards.tolerance import differences, precision
from piecegraph.runtime.parts.proof import row_trials
from piecegraph.runtime.parts.proof.op_rows import beyond
from piecegraph.runtime.parts.proof.row_mixing import find_mixed_rows
from piecegraph.runtime.parts.proof.row_trials import other_size
from tests.seen_collectives import Collectives

from ..conftest import captured, right_step, small_config, strict_backend

pytestmark = pytest.mark.compile


class Model(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4), requires_grad=False)
        self.last = last

    def forward(self, x, ids):
        x = x * self.weight + ids[:, None] + 1
        x = x / x.mean(-1, keepdim=True)  # of one row: is not what mixes rows
        return self.last(x)


# more forms are in test_padding_forms.py
MIXING = {
    "pooled": lambda y: y.sum(0),
    "last row": lambda y: y + y[-1],
    "transposed and joined": lambda y: y.t().reshape(-1),
}
ROW_WISE = {
    "elementwise": lambda y: y.relu() * 2,
    "softmax": lambda y: y.softmax(-1),
    "flattened": lambda y: y.reshape(-1),
    "repeated": lambda y: y.repeat_interleave(2, 0),
    "transposed": lambda y: y.t(),
    "two": lambda y: (y[:, :2], y @ y.new_ones(4, 4)),
    "random": lambda y: y + torch.rand_like(y) * 0,
    # as rows of one expert, which are multiplied in groups of another size
    "other last bits in other company": lambda y: y * (1 + 5e-7 * torch.sin(y.sum() * 100)),
}


INPUTS = {"x": "float32[num_tokens, 4]", "ids": "int64[num_tokens]"}


def prepared_for(last, **settings):
    model = Model(last)
    return captured(model, 16, inputs=INPUTS, capture_sizes=(2, 4, 8), **settings), model


def modes_of_right_steps(prepared, model, sizes=(3, 4, 7, 8)):
    inputs = ((torch.randn(size, 4), torch.randint(9, (size,))) for size in sizes)
    return [right_step(prepared, model, *each) for each in inputs]


@pytest.mark.parametrize("case", MIXING)
@pytest.mark.parametrize("compile", [True, False])
def test_failure_9_a_model_that_mixes_rows_is_never_padded(case, compile):
    prepared, model = prepared_for(MIXING[case], compile=compile)
    assert modes_of_right_steps(prepared, model) == ["NONE", "FULL", "NONE", "FULL"]
    (found,) = prepared.report()["rows_mixed"]
    line = MIXING[case].__code__.co_firstlineno
    assert found["where"].endswith(f"test_row_mixing.py:{line}")


def test_a_model_that_also_returns_a_size_is_looked_at():
    prepared, model = prepared_for(lambda y: (y + y[-1], y * y.shape[0], y.shape[0]))
    assert modes_of_right_steps(prepared, model) == ["NONE", "FULL", "NONE", "FULL"]


@pytest.mark.parametrize("seed", [2, 7])
def test_a_maximum_of_all_rows_is_found_wherever_it_is(seed):
    torch.manual_seed(seed)
    model = Model(lambda y: y / y.amax())
    model.weight.copy_(torch.randn(4))
    assert find_mixed_rows_of(model) != []


@pytest.mark.parametrize("case", ROW_WISE)
def test_a_model_that_does_not_is_padded(case):
    prepared, model = prepared_for(ROW_WISE[case])
    assert prepared.report()["rows_mixed"] == []
    assert modes_of_right_steps(prepared, model) == ["FULL"] * 4


@pytest.mark.parametrize("case", ["pooled", pytest.param("elementwise", marks=pytest.mark.heavy)])
def test_generated_code_is_checked_too(case):
    prepared, model = prepared_for({**MIXING, **ROW_WISE}[case], compiler="inductor")
    assert bool(prepared.report()["rows_mixed"]) == (case in MIXING)
    modes_of_right_steps(prepared, model)


def in_order_of_gates(gate, expert):
    """The six rows of each expert with the largest gates, as V-MoE keeps them."""
    order = gate.argsort(descending=True, stable=True)
    chosen = (expert[order][:, None] == torch.arange(4)).long()
    place = (chosen.cumsum(0) * chosen).sum(-1)
    return torch.zeros_like(place).scatter(0, order, (place <= 6).long())


def among_four_largest(gate, expert):
    ahead = (gate[None] > gate[:, None]) & (expert[None] == expert[:, None])
    return ahead.sum(-1) < 4


def in_order_of_rows(gate, expert):
    chosen = nn.functional.one_hot(expert, 4).float()
    return ((chosen.cumsum(0) * chosen).sum(-1).long() <= 6).long()


def by_expert(gate, expert):
    order = expert.argsort(stable=True)
    return torch.zeros_like(gate).index_add(0, order, gate[order] * (1 + expert[order]))


def weight_of_expert(gate, expert):
    """Rows of one expert are alike."""
    order = expert.argsort(stable=True)
    weights = torch.linspace(0.5, 2.0, 4)[expert[order]]
    return torch.zeros_like(gate).index_copy(0, order, gate[order] * weights)


class Routed(nn.Module):
    def __init__(self, weigh):
        super().__init__()
        self.weigh, self.tokens = weigh, nn.Embedding(32, 16)
        self.norm, self.router = nn.RMSNorm(16), nn.Linear(16, 4, bias=False)
        self.requires_grad_(False)

    def forward(self, x, ids):
        rows = self.norm(self.tokens(ids))
        gate, expert = self.router(rows).softmax(-1).max(-1)
        return rows * (gate * self.weigh(gate, expert))[:, None] + x.mean(-1, keepdim=True)


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("seed", [0, 3, 7])
@pytest.mark.parametrize(
    ("weigh", "mixes"),
    [
        (in_order_of_gates, True),
        (among_four_largest, True),
        (in_order_of_rows, False),
        (by_expert, False),
        (weight_of_expert, False),
    ],
)
def test_rows_that_only_a_full_expert_or_rank_mixes_are_found(weigh, mixes, seed, compile):
    torch.manual_seed(seed)
    config = {"max_num_tokens": 16, "capture_sizes": (8, 16), "compile": compile}
    found = find_mixed_rows_of(Routed(weigh), **config)
    assert [each["end"] for each in found] == [None] * mixes
    assert all("test_row_mixing.py:" in each["where"] for each in found)


def test_padding_that_points_to_a_request_of_a_full_batch_is_found():
    class Added(nn.Module):
        def forward(self, x, request, bias):
            return torch.zeros(bias.shape[0], 4).index_add(0, request, x + 1) + bias

    inputs = {"x": "float32[num_tokens, 4]", "request": "int64[num_tokens]"}
    inputs["bias"] = "float32[num_reqs, 4]"
    config = small_config(inputs=inputs, steps={"padding": {"request": 5}}, compile=False)
    for max_num_reqs in (5, 6):
        config = config.changed(max_num_reqs=max_num_reqs, capture_sizes=(8,))
        found = prepare(Added(), config, backend=strict_backend()).report()["rows_mixed"]
        assert [each["end"] for each in found] == [None] * (max_num_reqs == 6)


class Counting(nn.Module):
    """Reads a buffer, then writes it: its results depend on how often it ran, on no other row."""

    def __init__(self):
        super().__init__()
        self.register_buffer("ran", torch.ones(1))

    def forward(self, x, ids):
        y = x * self.ran
        self.ran.add_(1)
        return y + ids.unsqueeze(-1)


def test_a_buffer_that_is_read_and_written_mixes_no_rows():
    model = Counting()
    assert find_mixed_rows_of(model) == []
    assert model.ran.item() == 1.0


class Normed(nn.Module):
    """In training, which no schema of torch's says, a batch norm writes its statistics."""

    def __init__(self, training):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.requires_grad_(False).train(training)

    def forward(self, x, ids):
        return self.norm(x + ids[:, None])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("compile", [True, False])
def test_statistics_of_a_batch_norm_are_those_of_its_steps(compile, training):
    model, plain, sizes = Normed(training), Normed(training), {"capture_sizes": (2, 4)}
    sizes["tracing"] = {"min_num_tokens": 2}
    prepared = captured(model, inputs=INPUTS, compile=compile, **sizes)
    written = [each["result"] for each in prepared.report()["rows_mixed"]]
    assert written == ["norm.running_mean"] * training
    modes_of_right_steps(prepared, plain, (3, 4, 4))
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), buffer)


def test_the_check_leaves_no_trace():
    torch.manual_seed(1)
    model = Model(ROW_WISE["random"])
    assert find_mixed_rows_of(model) == []
    drawn = torch.rand(3)
    torch.manual_seed(1)
    Model(ROW_WISE["random"])
    assert torch.equal(torch.rand(3), drawn)


NUMBERS = {
    "clamp": lambda x, ids: x.clamp(max=x.shape[0]),
    "remainder": lambda x, ids: x + (ids % x.shape[0])[:, None],
    "subtracted": lambda x, ids: (x - x.shape[0]).relu(),
    "compared": lambda x, ids: torch.where(x > x.shape[0], 1.0, x),
    "read in Python": lambda x, ids: x + torch.minimum(ids, torch.tensor(x.shape[0]))[:, None],
}


class OfNumbers(nn.Module):
    def __init__(self, last):
        super().__init__()
        self.last = last

    def forward(self, x, ids):
        return self.last(x, ids)


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("case", NUMBERS)
def test_a_number_of_tokens_that_some_data_hides_is_that_of_the_batch(case, compile):
    """No run decides on it, also where one size alone is served by a graph of another."""
    model = OfNumbers(NUMBERS[case])
    prepared = captured(model, 16, inputs=INPUTS, capture_sizes=(2, 4, 8), compile=compile)
    for size in (1, 2, 3, 5, 6):
        right_step(prepared, model, torch.full((size, 4), 7.0), torch.full((size,), 7))


HIDING = {
    "sum": (0.0, lambda m, x: x + x.exp().sum(0) * m.gate),
    "difference": (1.0, lambda m, x: x * m.gate + x.exp().sum(0) * (1 - m.gate)),
    "number": (0.0, lambda m, x: x * (1 + m.gate * x.shape[0])),
    "kept apart by a mask": (0.0, lambda m, x: m.mask[: x.shape[0], : x.shape[0]] @ x + m.gate),
}


class Gated(nn.Module):
    def __init__(self, case):
        super().__init__()
        gate, self.last = HIDING[case]
        self.gate = nn.Parameter(torch.full((4,), gate), requires_grad=False)
        self.register_buffer("mask", torch.eye(16))
        self.wide = nn.Parameter(torch.zeros(1).expand(4), requires_grad=False)

    def forward(self, x, ids):
        return self.last(self, x) + ids[:, None] + self.wide


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("case", HIDING)
def test_what_zeros_and_ones_of_weights_hide_is_found(case, compile):
    """Values that are loaded later, in place, may show it."""
    model = Gated(case)
    place = model.gate.data_ptr()
    config = {"max_num_tokens": 16, "capture_sizes": (4, 8), "compile": compile}
    ends = {each["end"] for each in find_mixed_rows_of(model, **config)}
    assert ends == (set() if case == "kept apart by a mask" else {None})
    assert (model.gate.data_ptr(), model.gate.tolist()) == (place, [HIDING[case][0]] * 4)


def test_without_memory_for_other_weights_those_of_the_model_are_run(monkeypatch):
    monkeypatch.setattr(row_trials, "varied", mock.Mock(side_effect=torch.OutOfMemoryError))
    prepared, _ = prepared_for(ROW_WISE["elementwise"])
    assert [*find_mixed_rows(prepared.compiled, torch.device("cpu"), captured=(4, 8))] == []


@pytest.mark.parametrize("mixes", [False, True])
def test_operators_that_cannot_be_run_alone_are_said(monkeypatch, mixes):
    monkeypatch.setattr(row_trials, "PaddedOps", mock.Mock(side_effect=RuntimeError("none")))
    prepared, _ = prepared_for(MIXING["pooled"] if mixes else ROW_WISE["elementwise"])
    found = [*find_mixed_rows(prepared.compiled, torch.device("cpu"), captured=(4, 8))]
    assert [isinstance(each, str) for each in found] == [not mixes]
    assert mixes or "cannot be run alone: RuntimeError: none" in found[0]


def find_mixed_rows_of(model, **settings):
    config = Config(inputs=INPUTS, compiler="eager", cache=False, graph_mode="FULL")
    config = config.changed(attention={"support": 3}, **settings)
    return prepare(model, config).report()["rows_mixed"]


def scale_into(x, n, out):
    out.copy_(x * (1 + n / 1000))  # no run of two sizes shows such a difference


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    for name, kind in (("times", "SymInt"), ("times_int", "int")):
        schema, times = f"(Tensor x, {kind} n) -> Tensor", lambda x, n: x * n
        temporary_op(f"row_mixing::{name}", schema, times, lambda x, n: torch.empty_like(x))
    schema = "(Tensor x, SymInt n, Tensor(a!) out) -> ()"
    temporary_op("row_mixing::scale_into", schema, scale_into)
    schema = "(Tensor query, Tensor(a!) output) -> ()"
    temporary_op("row_mixing::attend", schema, lambda query, output: output.copy_(query))


class Attention(nn.Module):
    def forward(self, x):
        query = x * 2
        # results of the first piece that nothing has written: a tensor and a view
        output = torch.empty_like(query)
        heads = torch.empty_like(query).view(-1, 2, 2)
        torch.ops.row_mixing.attend(query.view(-1, 2, 2), heads)
        query = query + heads.view(-1, 4)
        torch.ops.row_mixing.attend(query, output)
        return output + 1


# a trace of `times_int` is one of a single size
@pytest.mark.parametrize(
    ("op", "compile"), [("times", True), ("times", False), ("times_int", False)]
)
def test_a_number_of_tokens_that_a_splitting_op_is_given_is_that_of_the_batch(op, compile):
    call = getattr(torch.ops.row_mixing, op)
    settings = {"compile": compile, "splitting_ops": (f"row_mixing::{op}",)}
    prepared, model = prepared_for(lambda y: call(y, y.shape[0]) + 1, **settings)
    modes_of_right_steps(prepared, model, (1, 2, 3, 4, 7))
    found = prepared.report()["rows_mixed"]
    assert found
    assert all("test_row_mixing.py:" in each["where"] for each in found)


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("then", [lambda out: out + 1, lambda out: out.clamp(max=0.5)])
def test_a_number_of_tokens_is_seen_in_an_op_that_returns_nothing(then, splits):
    def scaled(y):
        out = torch.empty_like(y)
        torch.ops.row_mixing.scale_into(y, y.shape[0], out)
        return then(out)

    splitting_ops = ("row_mixing::scale_into",) if splits else ()
    prepared, model = prepared_for(scaled, splitting_ops=splitting_ops)
    modes_of_right_steps(prepared, model, (1, 3, 4, 7))
    assert prepared.report()["rows_mixed"]


@pytest.mark.parametrize("mixes", [False, True])
def test_pieces_with_collectives_wait_for_no_rank(tmp_path, mixes):
    """How many runs are made depends on what this rank finds."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    reduced = lambda y: collectives.all_reduce(y, "sum", dist.group.WORLD)  # noqa: E731
    try:
        last = (lambda y: reduced(y - y.sum(0))) if mixes else reduced
        prepared, _ = prepared_for(last, compiler="eager")
        compiled = prepared.compiled
        with Collectives() as ranks:
            found = list(find_mixed_rows(compiled, torch.device("cpu"), captured=(4, 8)))
    finally:
        dist.destroy_process_group()
    assert not ranks.seen
    assert [each.size for each in found] == ["num_tokens"] * mixes


def test_memory_for_a_splitting_op_to_write_says_nothing_of_rows():
    junk = [torch.full((5, 4), float(value)) for value in range(64)]
    del junk  # the memory that is allocated next holds another value in each run
    config = small_config(16, splitting_ops=("row_mixing::attend",), graph_mode="PIECEWISE")
    assert prepare(Attention(), config).report()["rows_mixed"] == []


class Attends(nn.Module):
    """Tokens attend to the rows of an image, or look some of them up."""

    def __init__(self, lookup):
        super().__init__()
        self.lookup = lookup

    def forward(self, x, image, places):
        if self.lookup == "index":
            return x + image[places]
        if self.lookup == "compare":
            rows = torch.arange(image.shape[0])
            return x + (places[:, None] == rows).float() @ image
        return x + (x @ image.t()).softmax(-1) @ image


@pytest.mark.parametrize("limits", [(1, 8), (0, 4), (0, 2), (1, 2)])
@pytest.mark.parametrize("lookup", ["", "index", "compare"])
def test_padding_of_another_size_reaches_no_row(lookup, limits):
    inputs = {"x": "float32[num_tokens, 4]", "image": "float32[num_patches, 4]"}
    inputs["places"] = "int64[num_tokens]"
    model, tracing = Attends(lookup), {"symbol_limits": {"num_patches": limits}}
    prepared = captured(model, inputs=inputs, tracing=tracing, capture_sizes=(4, 8))
    found = prepared.report()["rows_mixed"]
    assert [each["size"] for each in found] == ([] if lookup else ["num_patches"])
    inputs = torch.randn(3, 4), torch.randn(2, 4), torch.randint(2, (3,))
    assert right_step(prepared, model, *inputs) == ("FULL" if lookup else "NONE")


OTHER_SIZE = {
    "few": (2, lambda x, image: x + image.mean(0)),
    "a number": (40, lambda x, image: x * max(1, image.shape[0] - 20)),
    "a choice": (6, lambda x, image: x * (2 if image.shape[0] > 5 else 3)),
    "a choice by both": (6, lambda x, image: x * (2 if x.shape[0] == image.shape[0] else 3)),
    "a choice that is none": (6, lambda x, image: x if x.shape[0] + image.shape[0] > 1 else -x),
}


USES = [(case, True) for case in OTHER_SIZE if "choice" not in case]  # which a trace refuses


@pytest.mark.parametrize(("case", "compiles"), [*USES, *((case, False) for case in OTHER_SIZE)])
def test_no_use_of_another_size_is_silently_wrong(case, compiles):
    class Uses(nn.Module):
        def forward(self, x, image):
            return form(x + 1, image)

    most, form = OTHER_SIZE[case]
    inputs = {"x": "float32[num_tokens, 4]", "image": "float32[num_patches, 4]"}
    tracing = {"symbol_limits": {"num_patches": (1, most)}}
    prepared = captured(
        Uses(), inputs=inputs, tracing=tracing, capture_sizes=(4,), compile=compiles
    )
    assert bool(prepared.recordings()) == (case == "a choice that is none")
    for patches in (1, 4, most):
        right_step(prepared, Uses(), torch.randn(4, 4), torch.randn(min(patches, most), 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("change", [0.0, 0.003, 0.4, torch.nan, torch.inf])
def test_one_row_that_differs_is_found(dtype, change):
    one = (torch.rand(5, 8) + 0.5).to(dtype)
    other = one.clone()
    other[3, 2] += change
    apart = differences(one, other) * precision(dtype) > other_size(precision(dtype))
    assert apart.tolist() == [False] * 3 + [not change < 0.1, False]
    assert torch.equal(beyond(one, other, other_size), apart)
    one[1] = other[1] = torch.nan  # padding that both runs kept
    assert torch.equal(beyond(one, other, other_size), apart)
