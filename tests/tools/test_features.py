"""What dispatch decides, in the reference engine: adapters, drafts, sizes, buckets, ranks."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from piecegraph.tools.cli.app import main

from .conftest import ONE_LAYER, started

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("traced_once")]

OPTIONS = ["--model", ONE_LAYER, "--backend", "eager", "--no-cache", "--verify", "all"]


@pytest.fixture
def run(tmp_path):
    def run(*options):
        path = tmp_path / "report.json"
        assert main(["run", *OPTIONS, "--json", str(path), *options]) == 0
        report = json.loads(path.read_text())
        assert report["verification"]["ok"]
        assert report["verification"]["steps"] == report["serving"]["steps"]
        assert report["unwatched"] == []
        return report

    return run


def test_adapters_and_drafts_together(run):
    report = run(
        *("--lora", "2", "--speculate", "2", "--requests", "12"),
        *("--length-scale", "0.1", "--max-num-reqs", "4", "--max-num-tokens", "32"),
        *("--capture-sizes", "4,12"),
    )
    cases = {each["case"]: each["steps"] for each in report["lora"]["cases_used"]}
    assert set(cases) <= {0, 1, 2, 3}
    assert len(cases) > 1
    speculation = report["speculation"]
    assert 0 < speculation["accepted"] < speculation["proposed"]
    keys = [row["descriptor"] for row in report["dispatch"] if row["mode"] == "FULL"]
    assert 3 in {key["uniform_query_len"] for key in keys}


def test_the_report_suggests_sizes_for_the_steps_of_the_shipped_trace(run):
    """Prompts fill steps of more tokens than the default sizes have."""
    sizes = run()["sizes"]
    assert sizes["sizes"][-1] < 128 == sizes["suggested"]["sizes"][-1]
    assert sizes["suggested"]["steps_above"] == 0 < sizes["steps_above"]
    fitted = ",".join(map(str, sizes["suggested"]["sizes"]))
    again = run("--capture-sizes", fitted)
    assert again["sizes"]["suggested"] is None
    with_graph = sum(row["count"] for row in again["dispatch"] if row["mode"] != "NONE")
    assert with_graph == again["serving"]["steps"]


def outputs(mode, **options):
    """What each step returned, and the tokens of each request; no step is padded."""
    found, modes = [], Counter()
    sizes = ",".join(map(str, range(1, 13)))
    with started(mode=mode, capture_sizes=sizes, **options) as engine:
        run = engine.service.engine.run

        def recorded(decision, *inputs, metadata):
            result = run(decision, *inputs, metadata=metadata)
            assert decision.descriptor.num_tokens == len(inputs[0])
            modes[decision.mode.name] += 1
            found.append(result.clone())
            return result

        engine.service.engine.run = recorded
        return found, engine.serve(), modes


@pytest.mark.parametrize("feature", ["speculate", "lora"])
def test_full_graphs_are_bit_equal_to_no_graphs(feature):
    with_graphs, tokens, modes = outputs("full-decode-only", **{feature: 3})
    without, same_tokens, _ = outputs("none", **{feature: 3})
    assert modes["FULL"] > 5
    assert tokens == same_tokens
    assert all(map(torch.equal, with_graphs, without))
    if feature == "speculate":
        assert outputs("none")[1] == tokens


FEW = ["--requests", "6", "--max-num-reqs", "4", "--max-num-tokens", "64", "--block-size", "32"]
LINES = "# prompts\n(range(1, 3), [32, 64], range(0, 3))\n(3, 16, 0)\n([1, 2], 1, range(1, 13))\n"


def plan(capsys, *options):
    """What `piecegraph sizes buckets` says of these options: data, text, and warnings."""
    capsys.readouterr()
    assert main(["sizes", "buckets", "--json", "-", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert main(["sizes", "buckets", *options]) == 0
    return facts, *capsys.readouterr()


@pytest.mark.parametrize("strategy", ["exponential", "linear", "padding-aware", "FILE"])
def test_steps_in_buckets(run, tmp_path, capsys, caplog, strategy):
    options = [*FEW, "--buckets", strategy]
    if strategy == "linear":
        options += ["--bucket", "prompt.query.max=64"]
    if strategy == "FILE":
        options[-1] = str(tmp_path / "buckets.txt")
        Path(options[-1]).write_text(LINES + "(1, 128, 0)\n")
    with caplog.at_level("INFO", "piecegraph"):
        report = run(*options)
    assert report["serving"]["generated_tokens"] == 19
    full = [row for row in report["dispatch"] if row["mode"] == "FULL"]
    assert len(full) > 2
    assert all(set(row["descriptor"]["axes"]) == {"query", "context"} for row in full)
    without = sum(row["count"] for row in report["dispatch"] if row["mode"] == "NONE")
    fallbacks = report["buckets"]["fallbacks"]
    assert sum(each["steps"] for each in fallbacks) == without
    logged = [record.message for record in caplog.records if "bucket.fallback" in record.message]
    assert len(logged) == len(fallbacks)
    captures = [step for step in report["warmup"] if step["kind"] == "capture"]
    assert [each["n"] for each in captures] == [*range(3, len(captures) + 3)]
    assert captures[0]["of"] == report["warmup"][-1]["n"]
    assert captures[0]["shape"].startswith("FULL 64: num_reqs ")
    phases = report["capture_phases"]
    assert [each["phase"] for each in phases] == ["prompt", "decode"]
    assert all(each["captured"] == each["planned"] for each in phases)
    facts, text, warnings = plan(capsys, *options)
    for phase, planned in zip(phases, facts.values(), strict=True):
        assert phase["planned"] == len(planned["buckets"])
        assert f"{phase['phase']}: {phase['planned']} buckets" in text
    assert sum(each["without"] for each in facts.values()) == without
    assert sum(each["steps"] for each in facts.values()) == report["serving"]["steps"]
    holes = [hole for each in facts.values() for hole in each["holes"]]
    assert len(report["buckets"]["holes"]) == len(holes)
    assert 0 < facts["prompt"]["rows"]["mean"] <= facts["prompt"]["rows"]["worst"] < 1
    assert ("left out: [(1, 128, 0), " in warnings) == (strategy == "FILE")


def test_graphs_of_buckets_share_the_memory_limit(run):
    limit = 300_000
    report = run(*FEW, "--buckets", "linear", "--set", f"steps.memory_limit={limit}")
    phases = {each["phase"]: each for each in report["capture_phases"]}
    assert 0 < phases["prompt"]["captured"] < phases["prompt"]["planned"]
    assert sum(each["taken"] for each in phases.values()) <= limit
    shapes = [step["shape"] for step in report["warmup"] if step["kind"] == "capture"]
    decode = [shape for shape in shapes if ", query 1," in shape]
    assert phases["decode"]["shapes"] == decode
    assert decode[0].startswith("FULL 4: num_reqs 4, query 1, context ")
    prompt = [shape for shape in shapes if shape not in decode]
    assert phases["prompt"]["shapes"] == prompt
    assert prompt[0].startswith("FULL 32: num_reqs 1, query 32, context 0")


ALL = {"lora": 2, "speculate": 2}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("size", "features"),
    [
        (2, {}),
        (2, {"overlap": True}),
        (2, ALL),
        (2, {**ALL, "overlap": True}),
        (4, {}),
        (4, {**ALL, "strategy": "lazy"}),
    ],
)
def test_data_parallel_ranks_serve_the_trace_in_step(tmp_path, size, features):
    script = Path(__file__).with_name("serving_ranks.py")
    command = [sys.executable, script, tmp_path, str(size), json.dumps(features)]
    subprocess.run(command, check=True, timeout=120)
    ranks = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(size)]
    steps = list(zip(*(each["steps"] for each in ranks), strict=True))
    for step in steps:
        assert len({mode for mode, _, _ in step}) == 1
        assert len({padded for mode, padded, _ in step if mode != "NONE"}) <= 1
    assert any(0 in [tokens for _, _, tokens in step] for step in steps)
    assert {mode for step in steps for mode, _, _ in step} >= {"FULL", "PIECEWISE"}
    served = {i: tokens for each in ranks for i, tokens in each["tokens"].items()}
    assert served == json.loads((tmp_path / "alone.json").read_text())
