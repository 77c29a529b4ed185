"""Code that Inductor partitioned, under capture and replay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import (
    AttentionSupport,
    Batch,
    Config,
    GraphMode,
    PreparedModel,
    RuntimeMode,
    compile_ahead,
    prepare,
)
from piecegraph.errors import InvalidSetting
from piecegraph.runtime.backends.replay import ReplayBackend, ReplayOptions
from piecegraph.runtime.graphs.recording import SegmentKind

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

GRAPH, EAGER = SegmentKind.GRAPH, SegmentKind.EAGER
OPS = ("live_partitions::fresh", "live_partitions::pair.tagged", "live_partitions::bump")
ran: list[str] = []


def fresh(x: Tensor) -> Tensor:
    ran.append("fresh")
    return x.cumsum(0)


def pair(x: Tensor, *, tag: str) -> tuple[Tensor, Tensor]:
    ran.append(f"pair {tag}")
    return x * len(tag), x - 1


def bump(state: Tensor, x: Tensor) -> None:
    ran.append("bump")
    state.add_(x[0])


@pytest.fixture(scope="module", autouse=True)
def ops() -> Iterator[None]:
    library: Any = torch.library.Library("live_partitions", "DEF")  # type: ignore[no-untyped-call]
    library.define("fresh(Tensor x) -> Tensor")
    library.define("pair.tagged(Tensor x, *, str tag) -> (Tensor, Tensor)")
    library.define("bump(Tensor(a!) state, Tensor x) -> ()")
    for name, run, fake in (
        ("fresh", fresh, torch.empty_like),
        ("pair.tagged", pair, lambda x, *, tag: (torch.empty_like(x), torch.empty_like(x))),
        ("bump", bump, lambda state, x: None),
    ):
        library.impl(name, run, "CPU")
        torch.library.register_fake(f"live_partitions::{name}", fake, lib=library)
    yield
    library._destroy()


class Mixed(nn.Module):
    """Ops that return, that return two, and that write to a buffer; values live across each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(4))
        self.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        live = torch.ops.live_partitions
        y = x @ self.weight
        z = live.fresh(y.sin())
        scaled, less = live.pair.tagged(z * y, tag="abc")
        live.bump(self.state, less + 1)
        return scaled.relu() + y + self.state @ self.weight


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("partitions")


def config(cache: Path, mode: GraphMode, **settings: Any) -> Config:
    return Config(
        splitting_ops=OPS,
        codegen={"inductor_partition": True},
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=16,
        max_num_reqs=16,
        capture_sizes=(2, 4, 8),
        graph_mode=mode,
        attention={"support": AttentionSupport.ALWAYS},
        cache_dir=cache,
        **settings,
    )


def prepared_for(cache: Path, mode: GraphMode, **settings: Any) -> tuple[PreparedModel, Mixed]:
    torch.manual_seed(0)
    model = Mixed()
    options = ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True)
    backend = ReplayBackend(options)
    prepared = prepare(model, config(cache, mode, **settings), backend=backend)
    prepared.capture(lambda descriptor, mode: None)
    return prepared, model


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL])
def test_results_and_state_are_the_models_step_after_step(cache: Path, mode: GraphMode) -> None:
    prepared, model = prepared_for(cache, mode)
    plain = Mixed()
    plain.load_state_dict(model.state_dict())
    modes = set()
    for size in (2, 3, 8, 1, 12, 4):
        x = torch.randn(size, 4)
        decision = prepared.dispatch(Batch(size, size, is_decode=True, query_len=1))
        modes.add(decision.mode)
        with torch.no_grad():
            torch.testing.assert_close(prepared.run(decision, x), plain(x))
        torch.testing.assert_close(model.state, plain.state)
    assert modes == {RuntimeMode.NONE} | ({RuntimeMode[mode.name]})


def test_ops_run_between_one_graph_for_each_partition(cache: Path) -> None:
    prepared, _ = prepared_for(cache, GraphMode.PIECEWISE)
    assert prepared.compiled.plan.partition_ops == tuple(sorted(OPS))
    recordings = [recording for _, recording in prepared.recordings()]
    assert len(recordings) == 3
    for recording in recordings:
        kinds = [segment.kind for segment in recording.segments]
        assert kinds == [GRAPH, EAGER, GRAPH, EAGER, GRAPH, EAGER, GRAPH]
        # a partition is one operation: nothing else is computed between splitting ops
        assert {segment.operations for segment in recording.segments} == {1}
    ran.clear()
    prepared(torch.randn(4, 4), batch=Batch(4, 4, is_decode=True, query_len=1))
    assert ran == ["fresh", "pair abc", "bump"]


def test_libraries_ahead_of_time_are_refused(cache: Path) -> None:
    with pytest.raises(InvalidSetting, match="ahead-of-time library cannot be partitioned"):
        compile_ahead(Mixed(), config(cache, GraphMode.NONE))
