"""Multi-dimensional buckets. From vLLM's Gaudi plugin (HPU bucketing managers)."""

import functools

import pytest

from piecegraph.dispatch import BucketLimits, Phase, find_holes, plan_buckets
from piecegraph.tools.cli.app import main

from .conftest import report_of

LIMITS = BucketLimits(block_size=16, max_num_tokens=64, max_model_len=128, max_num_reqs=4)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The report of a run with buckets of a strategy."""

    @functools.cache
    def served(strategy):
        options = ["--buckets", strategy, "--max-num-tokens", "32"]
        return report_of(tmp_path_factory.mktemp(strategy), *options)

    return served


@pytest.mark.parametrize(
    "strategy",
    [
        "linear",
        *(pytest.param(s, marks=pytest.mark.heavy) for s in ("exponential", "padding-aware")),
    ],
)
def test_a_strategy_serves_the_reference_engine(served, strategy):
    """Gaudi: `VLLM_EXPONENTIAL_BUCKETING`, linear ramp-up, padding limits."""
    assert served(strategy)["buckets"] is not None


def test_prompts_and_decodes_share_the_memory_for_graphs(served):
    """Gaudi: `VLLM_GRAPH_PROMPT_RATIO`, and an order for each phase."""
    phases = served("linear")["capture_phases"]
    assert {row["phase"] for row in phases} == {"prompt", "decode"}


def test_a_file_names_the_buckets(run, tmp_path):
    """Gaudi: `VLLM_BUCKETING_FROM_FILE`."""
    file = tmp_path / "buckets.txt"
    file.write_text("([1, 2, 4], 1, [2, 4, 8])\n([1, 2], [16, 64], [0, 2])\n")
    run("--buckets", str(file), "--max-num-tokens", "64")


@pytest.mark.parametrize("phase", Phase)
def test_every_batch_has_a_bucket_or_the_hole_is_known(phase):
    """piecegraph: the proof of coverage."""
    buckets = plan_buckets(phase, LIMITS, "exponential", {})
    assert buckets
    assert find_holes(phase, LIMITS, buckets) is not None


def test_a_plan_is_shown(capsys):
    """Gaudi: the list of buckets in the log."""
    assert main(["sizes", "buckets", "--buckets", "linear", "--requests", "8"]) == 0
    assert "bucket" in capsys.readouterr().out
