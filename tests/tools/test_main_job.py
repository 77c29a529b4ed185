"""The main job with nothing replaced: every mode and strategy, warm starts, what is reported."""

import json

import pytest
import torch

from piecegraph import GraphMode
from piecegraph.dispatch import CaptureStrategy
from piecegraph.tools.cli.app import main
from piecegraph.tools.serve.trace import EXCERPT, read_trace

pytestmark = pytest.mark.compile

CPU = torch.device("cpu")
MODES, STRATEGIES = tuple(GraphMode.__members__), tuple(CaptureStrategy.__members__)

HEAVY = pytest.mark.heavy
TRIED = {
    *((mode, "EAGER") for mode in ("NONE", "PIECEWISE", "FULL_AND_PIECEWISE")),
    ("FULL_DECODE_ONLY", "DELAYED"),
}
"""The others are those of tests/runtime/live/test_matrix.py, with an engine."""

ONE_LAYER = "layers=1,hidden=32,heads=2,kv_heads=1,vocab=64"
SMALL = ["--requests", "12", "--model", "layers=3,hidden=32,heads=2,kv_heads=1,vocab=64"]


@pytest.fixture
def run(tmp_path):
    """Run the main job in this process; returns its report."""

    def run(*options):
        path = tmp_path / "report.json"
        assert main(["run", *SMALL, "--json", str(path), *options]) == 0
        return json.loads(path.read_text())

    return run


once = pytest.mark.usefixtures("traced_once")


@once
@pytest.mark.parametrize(
    ("mode", "strategy"),
    [
        pytest.param(mode, strategy, marks=[] if (mode, strategy) in TRIED else HEAVY)
        for mode in MODES
        for strategy in STRATEGIES
    ],
)
def test_every_mode_and_strategy_serves_and_verifies(run, mode, strategy):
    report = run("--mode", mode, "--strategy", strategy, "--verify", "all")
    assert report["verification"]["ok"]
    assert report["verification"]["steps"] == report["serving"]["steps"] > 5
    rows = read_trace(EXCERPT, limit=12, length_scale=0.05)
    assert report["serving"]["generated_tokens"] == sum(row.num_generate for row in rows)
    assert report["graph_mode"]["requested"] == mode
    assert bool(report["captures"]) == (mode != "NONE")
    resolved = GraphMode[report["graph_mode"]["resolved"]]
    used = {entry["mode"] for entry in report["dispatch"]}
    assert used <= {resolved.decode.name, resolved.mixed.name, "NONE", "PIECEWISE"}
    assert sum(entry["count"] for entry in report["dispatch"]) == report["serving"]["steps"]


@once
def test_three_unique_pieces_whatever_the_depth_and_no_measured_memory(run):
    report = run()
    expected = {"total": 4, "unique": 3, "segments": 7}
    assert {name: report["pieces"][name] for name in expected} == expected
    assert report["warmup"]
    assert all(step["free_bytes"] is None for step in report["warmup"])  # of a CPU


@once
def test_each_batch_runs_in_its_own_mode(run):
    """Pure decode FULL, mixed batches within the sizes PIECEWISE, larger ones NONE."""
    report = run("--mode", "full-and-piecewise", "--requests", "64", "--max-num-reqs", "8")
    by_mode = {}
    for entry in report["dispatch"]:
        by_mode.setdefault(entry["mode"], []).append(entry["num_tokens"])
    assert set(by_mode) == {"FULL", "PIECEWISE", "NONE"}
    largest = max(capture["num_tokens"] for capture in report["captures"])
    assert max(by_mode["FULL"]) <= 8
    assert max(by_mode["PIECEWISE"]) <= largest < min(by_mode["NONE"])


@once
@pytest.mark.heavy
@pytest.mark.parametrize("level", range(4))
def test_every_level_serves(run, level):
    assert run("--level", str(level))["verification"]["ok"]


@once
@pytest.mark.parametrize(
    "strategy", ["LAZY", *(pytest.param(name, marks=HEAVY) for name in ("EAGER", "DELAYED"))]
)
def test_preemption_and_chunks_verify(run, strategy):
    options = "--kv-blocks 9 --max-num-tokens 24 --verify all --strategy " + strategy
    report = run(*options.split())
    assert report["verification"]["ok"]
    assert report["serving"]["preemptions"] > 0


def test_the_second_start_neither_traces_nor_compiles(run, tmp_path, text_compiler):
    """And without a cache nothing is left behind."""
    there = ["--model", ONE_LAYER, "--verify", "all", "--cache-dir", str(tmp_path / "cache")]
    assert run(*there, "--no-cache")["cache"]["entries"] == 0
    cold, warm = run(*there), run(*there)
    assert [each["cache"]["hit"] for each in (cold, warm)] == [False, True]
    assert [each["counters"]["dynamo_traces"] for each in (cold, warm)] == [1, 0]
    assert warm["verification"]["ok"]


def test_a_cold_start_serves_while_a_child_compiles(run, tmp_path):
    empty = str(tmp_path / "empty")
    report = run("--bundle", "serve", "--cache-dir", empty, "--verify", "all")
    assert report["verification"]["ok"]
    assert report["verification"]["steps"] == report["serving"]["steps"] > 5
    assert report["background"]["state"] in ("compiling", "compiled")
    assert report["background"]["failures"] == []
    assert report["counters"]["dynamo_traces"] == report["counters"]["inductor_compiles"] == 0
