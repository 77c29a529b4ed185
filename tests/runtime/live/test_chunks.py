"""Steps above the largest size: graphs over chunks of the tokens, attention over the whole step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, Config, GraphMode, prepare
from piecegraph.compile.plan.compiled_model import CompiledModel
from piecegraph.errors import InvalidSetting
from piecegraph.runtime.capture.chunks import chunk_obstacle

from .conftest import LiveServed

PIECEWISE = GraphMode.PIECEWISE


@pytest.fixture
def chunked(serve: Callable[..., LiveServed]) -> LiveServed:
    it = serve(mode=PIECEWISE, chunked=True)
    it.prepared.capture()
    return it


def test_attention_sees_the_whole_step(chunked: LiveServed) -> None:
    """Requests cross the borders of chunks; a chunk's remainder is padded."""
    assert chunked.step(3, 7, 1) == "PIECEWISE 11"  # 8 + 4
    assert chunked.step(16) == "PIECEWISE 16"
    assert chunked.step(5, 2) == "PIECEWISE 8"
    assert chunked.step(*[1] * 9) == "PIECEWISE 9"
    rows = {tuple(row.get("chunks", ())): row for row in chunked.prepared.usage.rows()}
    assert rows[8, 4]["padded_tokens"] == 1
    assert rows[8, 8]["padded_tokens"] == 0
    assert {row["mode"] for row in rows.values()} == {"PIECEWISE"}


def test_results_are_the_callers_own(chunked: LiveServed) -> None:
    x = torch.randn(12, 4)
    decision = chunked.prepared.dispatch(Batch(12, 1))
    result = chunked.prepared.run(decision, x)
    before = result.clone()
    chunked.prepared.run(decision, torch.randn(12, 4))
    assert torch.equal(result, before)
    assert not result.is_inference()


def test_a_chunk_whose_graph_was_freed_runs_without_a_graph(chunked: LiveServed) -> None:
    decision = chunked.prepared.dispatch(Batch(11, 1))
    chunked.prepared.release()
    x = torch.randn(11, 4)
    chunked.stage.starts.zero_()
    assert torch.equal(chunked.prepared.run(decision, x), chunked.expected(x))
    assert [row["mode"] for row in chunked.prepared.usage.rows()] == ["NONE"]
    chunked.prepared.capture()
    assert chunked.step(4, 7) == "PIECEWISE 11"


def test_replaced_weights_are_followed(chunked: LiveServed) -> None:
    scale: Any = chunked.model.layers[1]
    scale.weight = nn.Parameter(torch.rand(4), requires_grad=False)
    chunked.prepared.refresh()
    assert chunked.step(3, 9) == "PIECEWISE 12"


def test_a_rank_with_fewer_tokens_runs_as_many_chunks(chunked: LiveServed) -> None:
    there = chunked.prepared.dispatch(Batch(11, 1))
    follow = chunked.prepared.dispatcher.follow
    for num_tokens in (0, 3, 9):
        batch = Batch(num_tokens, min(num_tokens, 1))
        here = follow(there.graph_index, batch, there.chunks)
        assert here.chunks == there.chunks
        x = torch.randn(num_tokens, 4)
        chunked.stage.starts.zero_()
        before = chunked.backend.counters["replays"]
        assert torch.equal(chunked.prepared.run(here, x), chunked.expected(x))
        assert chunked.backend.counters["replays"] - before == 2 * 4


@pytest.mark.parametrize("kind", ["sum", "position"])
def test_a_model_whose_rows_depend_on_earlier_rows_is_refused(
    kind: str, temporary_op: Callable[..., str]
) -> None:
    """Padding is harmless there: it comes after the real rows."""
    schema = "(Tensor x, Tensor(a!) out) -> ()"
    op = temporary_op(f"chunk_tests::{kind}", schema, lambda x, out: out.copy_(x))
    copy = getattr(torch.ops.chunk_tests, kind)

    class Prefix(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.empty_like(x)
            copy(x, out)
            if kind == "sum":
                return (out * 2).cumsum(0)
            return out + torch.arange(out.shape[0])[:, None]

    config = Config(
        splitting_ops=(op,),
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=16,
        max_num_reqs=16,
        chunked=True,
        compiler="eager",
        cache=False,
    )
    with pytest.raises(InvalidSetting, match="depends on other rows"):
        prepare(Prefix(), config)


def test_what_cannot_be_cut_is_named(compiled: tuple[Any, CompiledModel]) -> None:
    _, traced = compiled
    assert chunk_obstacle(traced, {}) is None
    assert "engine" in (chunk_obstacle(traced, {"x": torch.empty(0)}) or "")
