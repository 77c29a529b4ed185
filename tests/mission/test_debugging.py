"""Why it did what it did. From tlparse, vLLM's debug dumps, bisection of compilers."""

import dataclasses

import pytest

import piecegraph as pg
from piecegraph.tools.cli.app import main

from .conftest import HIDDEN, SMALL, Model

CONFIG = {
    "splitting_ops": ("mission::attention",),
    "inputs": {"x": f"float32[num_tokens, {HIDDEN}]"},
    "max_num_tokens": 16,
    "compiler": "eager",
    "graph_mode": "NONE",
}
SMALLEST = SMALL.replace("layers=2", "layers=1")
FEW = ["--requests", "3", "--length-scale", "0.04", "--backend", "eager", "--no-cache"]
FEW += ["--model", SMALLEST]


@pytest.fixture(scope="module")
def bug(tmp_path_factory):
    """The report of a run."""
    folder = tmp_path_factory.mktemp("run") / "bug"
    other = ["--json", str(folder.with_name("report.json"))]
    assert main(["run", *FEW, *other, "--bug-report", str(folder)]) == 0
    assert (folder / "report.json").read_text() == folder.with_name("report.json").read_text()
    return folder


def test_a_miss_is_explained(tmp_path):
    """piecegraph: what differs from the nearest bundle."""
    config = pg.Config(**CONFIG, cache_dir=tmp_path)
    forecast = pg.explain_miss(Model(), config)
    assert forecast.reason == "absent"
    assert "absent" in str(forecast)


def test_a_bug_report_has_steps_graphs_and_trace(bug):
    """vLLM: `debug_dump_path`; torch: structured traces for tlparse."""
    assert {each.name for each in bug.iterdir()} >= {"graphs", "log.txt", "steps.pt"}


def test_a_right_run_bisects_to_nothing(bug):
    """Bisection over stages: each mode and strategy against the model."""
    steps = ["--replay", str(bug / "steps.pt")]
    assert main(["bisect", "--model", SMALLEST, *steps, "--backend", "eager"]) == 0


def test_what_a_step_checks_is_a_list(prepare):
    """piecegraph: `prepared.checks()`."""
    prepared = prepare()
    prepared.capture(None)
    decision = prepared.dispatch(pg.Batch(3, 3, is_decode=True, query_len=1))
    assert {check["owner"] for check in prepared.checks(decision)} >= {"core", "checks"}


def test_settings_are_checked_when_they_are_made():
    """A wrong name is an error that says the nearest one."""
    with pytest.raises(pg.PiecegraphError, match="max_num_tokens"):
        pg.Config(max_num_token=3)
    assert dataclasses.is_dataclass(pg.Batch)
