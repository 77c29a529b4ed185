"""Every form in which a model may mix, count and choose by its rows, traced and not: no step is
silently wrong, in its result or in the model's state, and models that do none keep their graphs."""

import copy
import math

import pytest
import torch
from torch import nn

from piecegraph import Batch, PiecegraphError, prepare

from ..conftest import right_step, small_config, strict_backend

pytestmark = pytest.mark.compile

KERNELS = {
    "attend": lambda x: x * 2,
    "wrong_at_8": lambda x: x.roll(1, -1) if len(x) == 8 else x + 0,
    "other_from_12": lambda x: x * (2 if len(x) >= 12 else 1),
    "sum_at_8": lambda x: x - x.sum(0) * (len(x) == 8),
}


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    for name, kernel in KERNELS.items():
        temporary_op(f"padding_forms::{name}", "(Tensor x) -> Tensor", kernel, torch.empty_like)


DUMP = 31
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16)


class Form(nn.Module):
    def __init__(self, last, before):
        super().__init__()
        self.linear, self.last, self.before = nn.Linear(4, 4), last, before
        self.register_buffer("load", torch.zeros(4))
        self.register_buffer("cell", torch.zeros(32, 4))
        self.register_buffer("total", torch.zeros(()))
        self.loose = torch.zeros(4)
        self.requires_grad_(False)

    def forward(self, x, slots, ids):
        y, self.ids = self.linear(x), ids
        if self.before is not None:
            y = self.before(y, self, slots)
        return self.last(torch.ops.padding_forms.attend(y), self, slots)

    def state(self):
        return [self.load, self.cell[:DUMP], self.total, self.loose]


def rows(y):
    return y.shape[0]


def size(y):
    return y.abs().sum(-1)


def then(y, *written):
    return y + 0


def place(chosen):
    """Of each row among those with the same choice."""
    return (chosen[:, None] == torch.arange(4)).cumsum(0).gather(1, chosen[:, None])


def ones(y):
    return torch.ones_like(y[:, 0])


MIXED = {
    "sum": lambda y, m, s: y - y.sum(0),
    "mean": lambda y, m, s: y - y.mean(0),
    "maximum": lambda y, m, s: y / y.amax(),
    "norm": lambda y, m, s: y / y.norm(),
    "softmax over rows": lambda y, m, s: y.softmax(0),
    "flip": lambda y, m, s: y.flip(0),
    "roll": lambda y, m, s: y.roll(1, 0),
    "last row": lambda y, m, s: y + y[-1],
    "sorted": lambda y, m, s: y.sort(0).values,
    "above the middle": lambda y, m, s: y * (size(y) >= size(y).median())[:, None],
    "four largest rows": lambda y, m, s: y * (size(y) >= size(y).sort().values[-4:][0])[:, None],
    "gram": lambda y, m, s: y @ (y.t() @ y),
    "concatenated": lambda y, m, s: torch.cat([y, 2 * y]),
    "an id of padding": lambda y, m, s: y * torch.where((m.ids == 0).any(), 2.0, 1.0),
    "sum from 9 rows on": lambda y, m, s: y - y.sum(0) if rows(y) > 8 else y * 1,
}
COUNTED = {
    "times rows": lambda y, m, s: y * rows(y),
    "by root of rows": lambda y, m, s: y / math.sqrt(rows(y)),
    "from 10 rows on": lambda y, m, s: y * max(1, rows(y) - 10),
    "by eights": lambda y, m, s: y * (1 + rows(y) // 8),
    "at least eight": lambda y, m, s: y / max(8, rows(y)),
    "remainder": lambda y, m, s: y * (1 + rows(y) % 3),
    "few parts in a thousand": lambda y, m, s: y * (1 + rows(y) / 8192),
    "filled": lambda y, m, s: y * torch.full((), rows(y)),
    "filled and compared": lambda y, m, s: torch.where(torch.full((), rows(y)) > 9, y, -y),
    "positions over rows": lambda y, m, s: y + (torch.arange(rows(y)) / rows(y))[:, None],
    "spaced": lambda y, m, s: y + torch.linspace(0, 1, rows(y))[:, None],
    "positions from the end": lambda y, m, s: y + torch.arange(rows(y) - 1, -1, -1)[:, None],
    "room for half of the rows": lambda y, m, s: y * (place(y.argmax(-1)) <= max(1, rows(y) // 2)),
    "at most rows": lambda y, m, s: (9 * y).clamp(max=rows(y)),
    "less rows": lambda y, m, s: (9 * y - rows(y)).relu(),
    "rows in a tensor": lambda y, m, s: torch.minimum(9 * y, y.new_full((), rows(y))),
    "ids by rows": lambda y, m, s: y + (m.ids * 7 % rows(y))[:, None],
    "above rows": lambda y, m, s: torch.where(9 * y > rows(y), 1.0, y),
    "logarithm": lambda y, m, s: y * int(math.log2(rows(y))),
}
CHOSEN = {
    "up to 9 rows": lambda y, m, s: y * 1.5 if rows(y) <= 9 else y * 0.5,
    "one row": lambda y, m, s: y * 2 if rows(y) == 1 else y * 1,
    "six rows": lambda y, m, s: y * 2 if rows(y) == 6 else y * 1,
    "odd": lambda y, m, s: y * 2 if rows(y) % 2 else y * 1,
    "elements": lambda y, m, s: y * 2 if y.numel() > 22 else y * 1,
    "nested": lambda y, m, s: y * (1 if rows(y) < 3 else 2) if rows(y) < 6 else y * 3,
    "length": lambda y, m, s: y * 2 if 4 < len(y) <= 7 else y * 1,
    "table": lambda y, m, s: y * {5: 2, 13: 3}.get(rows(y), 1),
    "kernel wrong at 8": lambda y, m, s: torch.ops.padding_forms.wrong_at_8(y),
    "kernel from 12 on": lambda y, m, s: torch.ops.padding_forms.other_from_12(y),
}
KEPT = {
    "tokens": lambda y, m, s: then(y, m.total.add_(ones(y).sum())),
    "rows": lambda y, m, s: then(y, m.total.add_(rows(y))),
    "by expert": lambda y, m, s: then(y, m.load.index_add_(0, y.argmax(-1), ones(y))),
    "by id": lambda y, m, s: then(y, m.load.index_add_(0, m.ids, ones(y))),
    "running mean": lambda y, m, s: then(y, m.load.mul_(0.99).add_(0.01 * y.mean(0))),
    "running maximum": lambda y, m, s: then(y, m.load.copy_(torch.maximum(m.load, y.amax(0)))),
    "the last row": lambda y, m, s: then(y, m.load.copy_(y[-1])),
    "first rows": lambda y, m, s: then(y, m.cell[: rows(y)].copy_(y)),
    "loose tensor": lambda y, m, s: then(y, m.loose.add_(y.sum(0))),
}
BY_ROW = {
    "elementwise": lambda y, m, s: y.relu() * 2,
    "positions": lambda y, m, s: y + torch.arange(rows(y))[:, None],
    "all rows": lambda y, m, s: torch.where(torch.arange(rows(y))[:, None] < rows(y), y, 0),
    "all rows, then a choice": lambda y, m, s: BY_ROW["all rows"](y, m, s).relu(),
    "running sum": lambda y, m, s: y.cumsum(0),
    "first row": lambda y, m, s: y - y[0],
    "counted steps": lambda y, m, s: then(y, m.total.add_(1)),
    "slots": lambda y, m, s: then(y, m.cell.index_copy_(0, s, y)),
}  # fmt: skip
FORMS = {**MIXED, **COUNTED, **CHOSEN, **KEPT, **BY_ROW}
BEFORE = {**KEPT, "slots": BY_ROW["slots"]}


def prepared_for(model, compiles, **settings):
    rows = "int64[num_tokens]"
    config = small_config(
        16,
        compile=compiles,
        inputs={"x": "float32[num_tokens, 4]", "slots": rows, "ids": rows},
        splitting_ops=("padding_forms::attend",),
        tracing={"guards": "split"},
        steps={"padding": {"slots": DUMP}},
        capture_sizes=(4, 8, 16),
        graph_mode="PIECEWISE" if compiles else "FULL",
    )
    return prepare(model, config.changed(**settings), backend=strict_backend())


OFTEN = {
    *("an id of padding", "room for half of the rows", "sum", "concatenated", "sum from 9 rows on"),
    *("times rows", "filled and compared", "less rows", "rows in a tensor", "ids by rows"),
    *(
        "all rows, then a choice",
        "positions over rows",
        "six rows",
        "nested",
        "kernel wrong at 8",
        "kernel from 12 on",
    ),
    *("by expert", "first rows", "loose tensor", "running sum", "counted steps", "slots"),
    *("by expert before attention", "slots before attention"),
}
"""Forms of which each is noticed in another way."""
CASES = (*FORMS, *(f"{name} before attention" for name in BEFORE))


@pytest.mark.parametrize("compiles", [True, False], ids=["traced", "untraced"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.heavy] * (c not in OFTEN)) for c in CASES]
)
def test_no_form_is_silently_wrong(case, compiles):
    torch.manual_seed(0)
    form = FORMS[case.removesuffix(" before attention")]
    model = Form(*((form, None) if case in FORMS else (BY_ROW["elementwise"], form)))
    plain = copy.deepcopy(model)
    try:
        prepared = prepared_for(model, compiles)
    except PiecegraphError as error:
        if case in BY_ROW or ".py:" not in str(error):
            raise
        return
    prepared.capture()
    graphs = 0
    for size in SIZES:
        inputs = torch.randn(size, 4), torch.randperm(DUMP)[:size], torch.randint(1, 4, (size,))
        graphs += right_step(prepared, plain, *inputs) != "NONE"
        torch.testing.assert_close(model.state(), plain.state())
    mixed = prepared.report()["rows_mixed"]
    if case.removesuffix(" before attention") in BY_ROW:
        assert (mixed, graphs) == ([], len(SIZES))
    else:
        assert mixed or len(prepared.compiled.traces()) > 1
        assert all(each["where"] and ".py:" in each["where"] for each in mixed)
    if case in KEPT:
        assert {each["result"] for each in mixed} & {"load", "cell", "total"} or "loose" in case


def test_rows_that_one_size_mixes_are_no_number_of_tokens():
    """No batch is padded; a batch of 8 rows is not like one of 9 either."""
    last = lambda y, m, s: torch.ops.padding_forms.sum_at_8(y)  # noqa: E731
    prepared = prepared_for(Form(last, None), True)
    assert {each["end"] for each in prepared.report()["rows_mixed"]} == {None, 8}


def test_a_kernel_of_an_uncaptured_size_serves_no_smaller_batch():
    """All pairs of a graph and its smallest batch agree, but not the graphs of 11 and 16."""
    form = FORMS["kernel from 12 on"]
    prepared = prepared_for(Form(form, None), True, capture_sizes=(11, 16))
    ends = {each["end"] for each in prepared.report()["rows_mixed"]}
    assert ends == {11}
    prepared.capture()
    assert prepared.dispatch(Batch(9, 9)).descriptor.num_tokens == 11
    assert prepared.dispatch(Batch(12, 12)).descriptor.num_tokens == 16
    prepared._core.graphs.remove(1)
    assert prepared.dispatch(Batch(9, 9)).mode.name == "NONE"
