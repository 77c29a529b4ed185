"""What runs before serving. From vLLM's and Gaudi's warm-up."""

import pytest

from .conftest import report_of


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The report of a run that warms up all there is, with temperatures that differ."""
    options = ["--requests", "24", "--defragment", "1", "--temperature", "0,0.8"]
    return report_of(tmp_path_factory.mktemp("warm"), *options)


@pytest.fixture(scope="module")
def skipping(tmp_path_factory):
    """The report of a run that skips a part of the warm-up, and samples among few."""
    options = ["--defragment", "4", "--skip-warmup", "sampler,defragmenter"]
    options += ["--temperature", "0.7", "--top-k", "5", "--top-p", "0.9"]
    return report_of(tmp_path_factory.mktemp("skipping"), *options)


def test_the_sampler_and_the_defragmenter_are_warmed_up(warm):
    """Gaudi: `warmup_sampler`, `warmup_defragmenter`."""
    kinds = {row["kind"] for row in warm["warmup"]}
    assert kinds >= {"range", "capture", "sampler", "defragmenter"}


def test_what_is_skipped_is_said_with_its_cost(skipping):
    """Gaudi: `VLLM_SKIP_WARMUP`."""
    rows = skipping["skipped_warmup"]
    assert {row["kind"] for row in rows} == {"sampler", "defragmenter"}
    assert all(row["cost"] for row in rows)


def test_requests_sample_each_with_its_settings(warm, skipping):
    """vLLM: the sampler of a mixed batch."""
    for report in (warm, skipping):
        assert report["serving"]["generated_tokens"] > 0


def test_blocks_are_moved_down_between_steps(warm):
    """Gaudi: the defragmenter."""
    assert warm["defragmentation"] is not None
