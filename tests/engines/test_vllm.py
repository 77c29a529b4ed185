"""vLLM gives the same tokens with piecegraph's worker as without."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.names import entry_names

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

HELPER = Path(__file__).with_name("vllm_engine.py")
ENCODER = {
    "runner": "pooling",
    "skip_tokenizer_init": False,
    "enable_prefix_caching": False,
    "enable_chunked_prefill": False,
    "max_num_batched_tokens": 256,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {},
    "gemma3": {},
    "bert": ENCODER,
}
"""Options of the engine by family."""
NO_COMPILER = {"compiler": "eager", "cache": False}
WARNING = "vLLM runs this model without piecegraph: "


class Engines:
    """Results of engines; those that a test names and no earlier one has run share a process."""

    def __init__(self, folder: Path) -> None:
        stored = {"after_seal": "raise", "cache_dir": str(folder / "cache")}
        graphs = {**NO_COMPILER, "graph_mode": "PIECEWISE", "capture_sizes": [1, 8, 16, 128]}
        self.jobs: dict[str, dict[str, Any]] = {
            **{
                name: {"family": name, "engine": {**engine, "enforce_eager": True}}
                for name, engine in FAMILIES.items()
            },
            **{
                f"{name} prepared": {"family": name, "settings": NO_COMPILER, "engine": engine}
                for name, engine in FAMILIES.items()
            },
            "graphs": {"family": "qwen3", "settings": graphs},
            "cold": {"family": "qwen3", "settings": stored},
            "warm": {"family": "qwen3", "settings": {**stored, "bundle": "force"}},
            "killed": {"family": "qwen3", "settings": {"cache_dir": str(folder / "killed")}},
            "refused": {
                "family": "qwen3",
                "settings": {"splitting_ops": ["vllm::nothing"]},
                "engine": {"compilation_config": {"mode": 0}},  # vLLM's own path, uncompiled
            },
        }
        self.folder = folder
        self.results: dict[str, Any] = {}
        self.log = ""

    def command(self, names: Sequence[str]) -> list[str]:
        jobs = json.dumps([self.jobs[name] for name in names])
        return [sys.executable, str(HELPER), str(self.folder), jobs]

    def __call__(self, *names: str) -> list[Any]:
        missing = [name for name in names if name not in self.results]
        if missing:
            done = subprocess.run(self.command(missing), capture_output=True, text=True)
            self.log += done.stdout + done.stderr
            found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            assert len(found) == len(missing), done.stderr[-3000:]
            for name, line in zip(missing, found, strict=True):
                self.results[name] = json.loads(line.removeprefix("RESULT "))
        return [self.results[name] for name in names]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("family", FAMILIES)
def test_results_are_those_of_vllm(engines: Engines, family: str) -> None:
    alone, prepared = engines(family, f"{family} prepared")
    assert len({tuple(tokens) for tokens in alone["made"]}) > 30
    assert prepared["made"] == alone["made"]
    assert prepared["report"]["refusal"] is None
    assert sum(row["count"] for row in prepared["report"]["dispatch"]) > 20
    assert prepared["explained"] > 1000
    assert "piecegraph_steps_total" in prepared["metrics"]


def test_a_warm_start_traces_and_compiles_nothing(engines: Engines) -> None:
    alone, cold, warm = engines("qwen3", "cold", "warm")
    for start, compiles in ((cold, True), (warm, False)):
        report = start["report"]
        assert start["made"] == alone["made"]
        assert report["cache"]["hit"] is not compiles
        assert (report["counters"]["dynamo_traces"] > 0) is compiles
        assert (report["counters"]["inductor_compiles"] > 0) is compiles
        assert report["pieces"]["unique"] < report["pieces"]["total"]
    assert "prepare: " in engines.log


def test_a_start_after_one_that_was_killed(engines: Engines) -> None:
    """It compiles what the first one had not stored."""
    (alone,) = engines("qwen3")
    cache = engines.folder / "killed"
    with open(engines.folder / "log", "w") as log:
        first = subprocess.Popen(
            engines.command(["killed"]), stdout=log, stderr=log, start_new_session=True
        )
        while first.poll() is None and not [*entry_names(cache)]:
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    (second,) = engines("killed")
    assert second["made"] == alone["made"]
    assert 0 < second["report"]["counters"]["inductor_compiles"] < 3


def test_without_any_graph_steps_run_without(engines: Engines) -> None:
    """oneDNN reads the address of its weights on the host, which the replay backend refuses."""
    alone, graphs = engines("qwen3", "graphs")
    assert graphs["made"] == alone["made"]
    assert {row["mode"] for row in graphs["report"]["dispatch"]} == {"NONE"}
    assert "vLLM serves without graphs: all 4 captures failed" in engines.log


def test_a_model_that_is_refused_runs_as_in_vllm(engines: Engines) -> None:
    alone, refused = engines("qwen3", "refused")
    assert refused["made"] == alone["made"]
    reason = refused["report"]["refusal"]
    assert "vllm::nothing" in reason
    assert engines.log.count(WARNING) == 1
    assert WARNING + reason.splitlines()[0] in engines.log


def test_the_example_runs(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "vllm_offline.py"
    environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, env=environment
    )
    assert "the same tokens; warm start: False" in done.stdout, done.stderr[-3000:]
