"""What runs before serving. From vLLM's and Gaudi's warm-up."""

import pytest


def test_the_sampler_and_the_defragmenter_are_warmed_up(run):
    """Gaudi: `warmup_sampler`, `warmup_defragmenter`."""
    kinds = {row["kind"] for row in run("--defragment", "4")["warmup"]}
    assert kinds >= {"range", "capture", "sampler", "defragmenter"}


def test_what_is_skipped_is_said_with_its_cost(run):
    """Gaudi: `VLLM_SKIP_WARMUP`."""
    rows = run("--defragment", "4", "--skip-warmup", "sampler,defragmenter")["skipped_warmup"]
    assert {row["kind"] for row in rows} == {"sampler", "defragmenter"}
    assert all(row["cost"] for row in rows)


def test_prompts_and_decodes_share_the_memory_for_graphs(run):
    """Gaudi: `VLLM_GRAPH_PROMPT_RATIO`, and an order for each phase."""
    phases = run("--buckets", "linear", "--max-num-tokens", "64")["capture_phases"]
    assert {row["phase"] for row in phases} == {"prompt", "decode"}


@pytest.mark.parametrize("option", [["--temperature", "0,0.8"], ["--top-k", "5", "--top-p", "0.9"]])
def test_requests_sample_each_with_its_settings(run, option):
    """vLLM: the sampler of a mixed batch."""
    temperature = [] if "--temperature" in option else ["--temperature", "0.7"]
    assert run(*option, *temperature)["serving"]["generated_tokens"] > 0


def test_blocks_are_moved_down_between_steps(run):
    """Gaudi: the defragmenter."""
    assert run("--requests", "24", "--defragment", "1")["defragmentation"] is not None
