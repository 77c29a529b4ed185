"""Small programs of torch: FULL graphs as without, and no assertion of a program is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._higher_order_ops.scan import scan

import piecegraph as pg
from piecegraph.errors import GuardUnproved, ResultFormUnknown, Specialized

from ..conftest import Computes, captured, right_step

pytestmark = pytest.mark.compile


def asserted(condition, check=torch._check):
    def body(x):
        check(condition(x))
        return x * 2

    return body


def with_message(condition):
    def body(x):
        rows = x.size(0)
        torch._check(condition(x), lambda: f"not with {rows} rows")
        return x * 2

    return body


WAYS = {
    "check": asserted,
    "assert": lambda condition: asserted(condition, lambda held: torch._assert(held, "no")),
    "message": with_message,
}


def prepared(body, **settings):
    settings = {"compiler": "inductor", "capture_sizes": (2, 8), **settings}
    return captured(Computes(body), metadata_for=lambda descriptor, mode: None, **settings)


def full_step(model, x):
    rows = x.size(0)
    decision = model.dispatch(pg.Batch(rows, rows, is_decode=True, query_len=1))
    assert decision.mode is pg.RuntimeMode.FULL
    return model.run(decision, x)


BOTH = ({"compiler": "eager"}, {"compile": False})
PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], Any]] = {
    "expanded": (lambda x: x.sum(1)[:, None].expand(-1, 3), BOTH),
    "expanded_and_not": (lambda x: (x.sum(1).expand(2, -1), x * 2), BOTH),
    "overlapping": (lambda x: (x * 2).unfold(1, 2, 1), BOTH),
    "cond_on_a_size": (
        lambda x: torch.cond(x.shape[0] < 4, lambda y: y + 1, lambda y: y - 1, (x,)),
        BOTH,
    ),
    "scan": (lambda x: x + scan(lambda c, y: (c + y, c + y), torch.zeros(4), x)[0], BOTH),
    "vmap": (lambda x: torch.ones(()) + torch.vmap(lambda r: r * r.sum())(x), BOTH[1:]),
    "grad": (lambda x: torch.func.grad(lambda y: (y * y).sum())(x), BOTH[1:]),
    "packets": (
        lambda x: torch.ops.aten.pow(x, 2) + torch.ops.aten.masked_fill(x, x > 0, 1.0),
        BOTH,
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_full_graphs_of_programs(name):
    body, ways = PROGRAMS[name]
    for way in ways:
        model = prepared(body, **way)
        for rows in (2, 8, 2):
            assert right_step(model, body, torch.randn(rows, 4)) == "FULL"


def beside_a_scan(x):
    total, _ = scan(lambda c, y: (c + y, c + y), x[:, 0] * 0, x.t())
    return x / (x.shape[0] / 1000 + 1) + total[:, None]  # no run shows such a difference


def inside_a_scan(x):
    rows = x.shape[0]
    return x + scan(lambda c, y: (c + y, y.clamp(max=rows + 20.0)), x[:, 0] * 0, x.t())[1].t()


def inside_a_cond(x):
    rows = x.shape[0]
    return torch.cond(rows < 100, lambda y: y.clamp(max=rows + 20.0), lambda y: y - 1, (x,))


@pytest.mark.parametrize("way", BOTH)
@pytest.mark.parametrize("body", [beside_a_scan, inside_a_scan, inside_a_cond])
def test_a_number_of_tokens_beside_or_inside_an_operator_of_higher_order_is_seen(body, way):
    right_step(prepared(body, **way), body, torch.full((3, 4), 100.0))


def test_rows_of_a_scan_are_padded_where_none_takes_a_number_of_tokens(caplog):
    def body(x):
        zeros = torch.zeros(x.shape[0])
        return x + scan(lambda c, y: (c + y, c * y + zeros), x[:, 0] * 0, x.t())[1].t()

    with caplog.at_level("INFO"):
        model = prepared(body, compiler="eager")
    assert "rows_unchecked" not in caplog.text
    assert right_step(model, body, torch.randn(3, 4)) == "FULL"


def test_an_assertion_on_values_holds_in_each_replay():
    body = asserted(lambda x: (x >= 0).all(), torch._assert_async)
    for way in (*BOTH, {"compiler": "inductor"}):
        model = prepared(body, **way)
        for sign in (1, -1, 1):
            x = sign * torch.ones(8, 4)
            if sign > 0:
                assert torch.equal(full_step(model, x), x * 2)
                continue
            with pytest.raises(RuntimeError, match="nonzero value"):
                full_step(model, x)
    options = {"compiler": "inductor", "cache": False, "strict": True}
    fast = torch.compile(body, backend="piecegraph", fullgraph=True, options=options)
    assert torch.equal(fast(x), x * 2)
    with pytest.raises(RuntimeError, match="nonzero value"):
        fast(-x)


CONDITIONS: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "most": (lambda n: n <= 5, GuardUnproved, "num_tokens <= 5.* set max_num_tokens=5"),
    "least": (lambda n: n >= 3, GuardUnproved, "num_tokens >= 3.*min_num_tokens=3"),
    "multiple": (lambda n: n % 2 == 0, GuardUnproved, r"Mod\(num_tokens, 2\)"),
    "one": (lambda n: n == 4, Specialized, "num_tokens = 4"),
}


@pytest.mark.parametrize("name", CONDITIONS)
@pytest.mark.parametrize("way", WAYS)
def test_a_refused_assertion_on_sizes_names_condition_and_line(name, way):
    condition, error, expected = CONDITIONS[name]
    with pytest.raises(error, match=expected) as raised:
        prepared(WAYS[way](lambda x: condition(x.size(0))), compiler="eager")
    assert "test_programs.py:" in str(raised.value)
    with pytest.raises(ResultFormUnknown, match=r"num_tokens': \d+. it raises") as unknown:
        prepared(WAYS[way](lambda x: x.size(0) == 0), compile=False)
    assert "test_programs.py:" in str(unknown.value)


SOURCES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero().size(0),
    "masked": lambda x: x[x > 0].size(0),
    "item": lambda x: x.sum().item(),
    "sum": lambda x: x.nonzero().size(0) + x[x < 0].size(0),
}
PLANTED: dict[str, Callable[[int, int], Any]] = {
    "number": lambda n, rows: n == 4,
    "rows": lambda n, rows: n == rows - 2,
    "at_most": lambda n, rows: n <= 4,
    "multiple": lambda n, rows: n % 2 == 0,
    "after": lambda n, rows: n + 1 == 5,
}


KEPT = pytest.mark.needs_torch("2.13", "AOTAutograd drops an assertion that a size is a number")


@pytest.mark.parametrize(
    "source",
    [pytest.param(s, marks=[KEPT] if s in ("nonzero", "masked") else []) for s in SOURCES],
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_an_assertion_on_data_holds_or_raises_in_each_call(source):
    """Also what the trace has learned from it: that a size is 4, or that of an input."""
    for condition in PLANTED.values():

        def body(x, condition=condition):
            torch._check(condition(SOURCES[source](x), x.size(0)))
            return x * 2

        torch.compiler.reset()
        options = {"compiler": "eager", "cache": False, "strict": True}
        fast = torch.compile(
            body, backend="piecegraph", dynamic=True, fullgraph=True, options=options
        )
        raised = set()
        for rows, ones in ((6, 4), (6, 3), (8, 6), (4, 2), (8, 4)):
            x = torch.tensor([1] * ones + [0] * (rows - ones))
            try:
                expected = body(x)
            except RuntimeError:
                raised.add(True)
                with pytest.raises(RuntimeError):
                    fast(x)
            else:
                raised.add(False)
                assert torch.equal(fast(x), expected)
        assert raised == {True, False}
    torch.compiler.reset()
