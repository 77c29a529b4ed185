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
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from piecegraph import Config, Lazy, prepare
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
TWO_PROCESSES = {"distributed_executor_backend": "mp"}
CASES: dict[str, dict[str, Any]] = {
    "smollm2": {},
    "qwen3": {},
    "llama": {},
    "qwen3_moe": {},
    "olmo": {},
    "gpt_neox": {},
    "gpt2": {},
    "gemma3": {},
    "granite_hybrid": {"enable_prefix_caching": False},
    "bert": ENCODER,
    "qwen3, drafts": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    },
    "qwen3, embeddings": {"enable_prompt_embeds": True},
    "deepstack": {"hf_overrides": {"architectures": ["DeepstackForCausalLM"]}},
    "qwen3, two ranks": {**TWO_PROCESSES, "tensor_parallel_size": 2},
    "qwen3, two stages": {**TWO_PROCESSES, "pipeline_parallel_size": 2},
}
"""Options of the engine by family and feature. Only SmolLM2 is trained."""
IDS = {"input_ids": "int32[num_tokens]", "positions": "int64[num_tokens]"}
ROWS = {f"deepstack_input_embeds.tensors.deepstack_input_embeds_{n}": "float32[num_tokens, 64]"
        for n in range(2)}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {"deepstack": {"inputs": [IDS, IDS | ROWS]}}
EAGER: dict[str, dict[str, Any]] = {
    "qwen3, two stages": {"compilation_config": {"mode": 2, "backend": "eager"}}
}
"""How vLLM runs uncompiled, if not with `enforce_eager`: on a CPU vLLM 0.32 then leaves out the
warm-up that allocates what stages exchange, and the first step fails."""

VERIFIED = ("gemma3", "granite_hybrid", "qwen3_moe")
WRAPPED = ("qwen3", "llama", "qwen3_moe")
LORA = {"enable_lora": True, "max_lora_rank": 8}
NO_COMPILER = {"compiler": "eager", "cache": False}
OWN_PATH = {"compilation_config": {"mode": 0}}
"""vLLM's own path, uncompiled."""
WARNING = "vLLM runs this model without piecegraph: "


class Engines:
    """Results of engines; those that a test names and no earlier one has run share a process."""

    def __init__(self, folder: Path) -> None:
        stored = {"steps": {"after_seal": "raise"}, "cache_dir": str(folder / "cache")}
        capacity = {"cache_dir": str(folder / "capacity")}
        capacity_engine = {"engine": {"gpu_memory_utilization": 0.3}, "capacity": True}
        graphs = {**NO_COMPILER, "graph_mode": "PIECEWISE", "capture_sizes": [1, 8, 16, 128]}
        self.jobs: dict[str, dict[str, Any]] = {
            "graphs": {"settings": graphs},
            "proved": {"settings": {**NO_COMPILER, "shadow": {"every": 1, "share": 1.0}}},
            "not compiled": {"settings": {"compile": False, "cache": False}},
            "first step fails": {"settings": NO_COMPILER, "first step fails": True},
            "wrong code": {"settings": {**NO_COMPILER, "compiler": "planted"}},
            "sleeps": {"settings": NO_COMPILER, "sleeps": True},
            "goes around": {"settings": NO_COMPILER, "goes around": True},
            "mode NONE": {"settings": NO_COMPILER, "engine": OWN_PATH},
            "cold": {"settings": stored},
            "warm": {"settings": {**stored, "bundle": "force"}},
            "capacity, cold": {"settings": capacity, **capacity_engine},
            "capacity, warm": {"settings": capacity, **capacity_engine},
            "killed": {"settings": {"cache_dir": str(folder / "killed")}},
            "forced": {"settings": {"cache_dir": str(folder / "empty"), "bundle": "force"}},
            "refused": {"settings": {"splitting_ops": ["vllm::nothing"]}, "engine": OWN_PATH},
        }
        for family in VERIFIED:
            for start in ("cold", "warm"):
                stored = {"cache_dir": str(folder / "verified")}
                self.jobs[f"{family}, {start}"] = {
                    "family": family,
                    "settings": {**stored, **SETTINGS.get(family, {})},
                    "engine": CASES[family],
                    "verifies": start == "warm",
                }
        for family in WRAPPED:
            wrapped = {"family": family, "settings": {"cache": False}, "wrapped": True}
            self.jobs[f"{family}, wrapped"] = wrapped
        for case, engine in (CASES | {"qwen3, adapters": LORA}).items():
            family, alone = case.partition(",")[0], EAGER.get(case, {"enforce_eager": True})
            faults = ["attention"] if engine is ENCODER else ["attention", "KV row"]
            planted = {} if "two" in case else {"planted": faults}
            job = {"family": family, "kinds": family == "smollm2"}
            settings = {
                **NO_COMPILER,
                **({"steps": {"after_seal": "raise"}} if job["kinds"] else {}),
                **SETTINGS.get(case, {}),
            }
            self.jobs[case] = {**job, "engine": {**engine, **alone}, **planted}
            self.jobs[f"{case}, prepared"] = {**job, "engine": engine, "settings": settings}
        self.folder = folder
        self.results: dict[str, Any] = {}
        self.log = ""

    def command(self, names: Sequence[str]) -> list[str]:
        jobs = json.dumps([{"family": "qwen3"} | self.jobs[name] for name in names])
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

    def equal(self, alone: str, *names: str) -> list[Any]:
        """Results of the jobs `names`, whose tokens are those of vLLM alone."""
        expected, *found = self(alone, *names)
        for result in found:
            assert result["made"] == expected["made"]
        return found


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    return Engines(tmp_path_factory.mktemp("vllm"))


@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_vllm(engines, case):
    if case == "qwen3, drafts":  # vLLM starts once in a process that has imported numba
        engines(case)
    alone, prepared = engines(case, f"{case}, prepared")
    for fault in engines.jobs[case].get("planted", ()):
        assert alone["noticed"][fault], fault
    assert prepared["made"] == alone["made"]
    workers = 2 if "two" in case else 1
    assert prepared["refusals"] == [None] * workers
    assert sum(row["count"] for row in prepared["report"]["dispatch"]) > 20
    assert prepared["explained"] > 1000
    assert "piecegraph_steps_total" in prepared["metrics"]
    assert prepared["served_metrics"].count("piecegraph_serving_uncompiled{") == workers


def test_a_model_that_is_called_in_two_forms(engines):
    """With what an image adds to the first layers, and without: pieces behind them are equal. A
    form that is not listed runs uncompiled."""
    jobs = engines.jobs
    one = {**jobs["deepstack, prepared"], "settings": NO_COMPILER}
    jobs["deepstack, one form"] = one
    names = ("deepstack", "deepstack, prepared", "deepstack, one form")
    prepared, unlisted = engines.equal(*names)
    report = prepared["report"]
    assert report["counters"]["dynamo_traces"] == 2
    assert (report["pieces"]["total"], report["pieces"]["unique"]) == (8, 4)
    steps = [
        sum(row["count"] for row in each["report"]["dispatch"]) for each in (prepared, unlisted)
    ]
    assert steps[0] > steps[1] + 20
    assert engines.log.count("a step is not as it was prepared") == 1


@pytest.mark.parametrize("family", WRAPPED)
def test_vllms_own_ops_are_lowered_by_its_own_passes(engines, family):
    """Norms and activations are such ops where vLLM wraps them, as on a GPU."""
    (wrapped,) = engines.equal(family, f"{family}, wrapped")
    assert wrapped["refusals"] == [None]
    assert (wrapped["opaque"], wrapped["report"]["opaque_ops"]) == ([], [])


def test_a_model_that_vllm_compiles_in_no_mode_is_prepared(engines):
    (prepared,) = engines.equal("qwen3", "mode NONE")
    assert prepared["refusals"] == [None]


def test_a_warm_start_traces_and_compiles_nothing(engines):
    cold, warm = engines.equal("qwen3", "cold", "warm")
    for start, compiles in ((cold, True), (warm, False)):
        report = start["report"]
        assert report["cache"]["hit"] is not compiles
        assert (report["counters"]["dynamo_traces"] > 0) is compiles
        assert (report["counters"]["inductor_compiles"] > 0) is compiles
        assert report["pieces"]["unique"] < report["pieces"]["total"]
    assert "prepare: " in engines.log


@pytest.mark.parametrize("family", VERIFIED)
def test_a_warm_start_is_verified(engines, family):
    """Beside its steps; where the model reads vLLM's context, before them."""
    cold, warm = engines.equal(family, f"{family}, cold", f"{family}, warm")
    assert [start["report"]["cache"]["hit"] for start in (cold, warm)] == [False, True]
    assert warm["verified"] is True


def test_the_kv_cache_is_as_large_after_a_cold_start(engines):
    """Each in a process of its own: compiling leaves memory in it."""
    (cold,), (warm,) = engines("capacity, cold"), engines("capacity, warm")
    assert [start["report"]["cache"]["hit"] for start in (cold, warm)] == [False, True]
    assert cold["blocks"] == pytest.approx(warm["blocks"], rel=1e-3)


def test_a_start_after_one_that_was_killed(engines):
    """It compiles what the first one had not stored."""
    cache = engines.folder / "killed"

    def pieces():
        return [name for name in entry_names(cache) if "/artifact/" in name]

    with open(engines.folder / "log", "w") as log:
        first = subprocess.Popen(
            engines.command(["killed"]), stdout=log, stderr=log, start_new_session=True
        )
        while first.poll() is None and not pieces():
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    stored = pieces()
    (second,) = engines.equal("qwen3", "killed")
    assert second["report"]["counters"]["inductor_compiles"] == 3 - len(stored) < 3


def test_without_any_graph_steps_run_without(engines):
    """oneDNN reads the address of its weights on the host, which the replay backend refuses."""
    (graphs,) = engines.equal("qwen3", "graphs")
    assert {row["mode"] for row in graphs["report"]["dispatch"]} == {"NONE"}
    assert "vLLM serves without graphs: all 4 captures failed" in engines.log


def test_steps_are_proved_while_vllm_serves(engines):
    """The KV caches are known as state, so that a step can run a second time."""
    (proved,) = engines.equal("qwen3", "proved")
    shadow = proved["report"]["shadow"]
    assert (shadow["stopped"], shadow["wrong"]) == (None, [])
    assert sum(row["count"] for row in shadow["proved"]) > 20


def test_wrong_code_leaves_service_at_the_first_real_step(engines):
    """vLLM's dummy runs are no proof: its attention leaves the output of these unwritten."""
    (wrong,) = engines.equal("qwen3", "wrong code")
    assert wrong["refusals"] == [None]
    shadow = wrong["report"]["shadow"]
    assert [step["out_of_service"] for step in shadow["wrong"]] == ["compiled code"]
    assert shadow["skipped"]["a dummy step of the engine"] > 0


@pytest.mark.parametrize(
    ("alone", "name", "words"),
    [
        ("qwen3", "refused", "vllm::nothing"),
        ("qwen3, adapters", "qwen3, adapters, prepared", "the adapters of a batch"),
    ],
)
def test_a_model_that_is_refused_runs_as_in_vllm(engines, alone, name, words):
    (refused,) = engines.equal(alone, name)
    reason = refused["report"]["refusal"]
    assert words in reason
    assert engines.log.count(WARNING + reason.splitlines()[0]) == 1


def test_a_model_that_is_not_compiled(engines):
    (prepared,) = engines.equal("qwen3", "not compiled")
    assert prepared["refusals"] == [None]
    assert sum(row["count"] for row in prepared["report"]["dispatch"]) > 20


def test_a_first_step_that_fails_falls_back(engines):
    (failed,) = engines.equal("qwen3", "first step fails")
    assert failed["refusals"] == ["RuntimeError: the first step fails"]
    assert engines.log.count(WARNING + "RuntimeError: the first step fails") == 1


def test_an_engine_sleeps_and_wakes(engines):
    """On a CPU vLLM does nothing then, and refuses its own setting for it."""
    from vllm.platforms import current_platform

    (slept,) = engines.equal("qwen3", "sleeps")
    assert slept["after sleep"] == slept["made"]
    assert slept["refusals"] == [None]
    assert "sleep mode is not supported on CPU" in engines.log
    assert not current_platform.is_sleep_mode_available()


def test_an_engine_that_goes_around_the_prepared_model_is_named(engines):
    engines.equal("qwen3", "goes around")
    assert engines.log.count("10 steps went around the prepared model: Qwen3ForCausalLM") == 1


def test_requests_of_all_kinds_run_though_compiling_is_an_error(engines):
    """vLLM compiles a function of its own for the first request with logprobs."""
    alone, prepared = engines("smollm2", "smollm2, prepared")
    assert prepared["made"] == alone["made"]
    assert alone["noticed"]["attention"] == [*range(8 + 20)], "a result that shows nothing"
    counters = prepared["report"]["counters"]
    assert not [name for name in counters if name.startswith("after_seal.")]


def test_force_lets_nothing_compile(engines):
    done = subprocess.run(engines.command(["forced"]), capture_output=True, text=True)
    assert done.returncode != 0
    assert "BundleMissing" in done.stdout + done.stderr
    assert WARNING not in done.stdout + done.stderr


def test_adapters_matter(engines):
    plain, adapted = engines("qwen3", "qwen3, adapters")
    assert plain["made"] != adapted["made"]


def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "vllm_offline.py"
    environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, env=environment
    )
    assert "the same tokens; warm start: False" in done.stdout, done.stderr[-3000:]


@pytest.mark.parametrize("wheel", [None, "newer"])
def test_vllm_decides_as_it_does_alone(wheel):
    """Graph modes of both runners, for each support of attention; by the Python of two versions."""
    folder = Path(sys.prefix) / "newer"
    command = [sys.executable, str(HELPER.with_name("vllm_decisions.py"))]
    environment = os.environ | {"VLLM_TARGET_DEVICE": "cpu"}  # no wheel has a GPU here
    if wheel:
        places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(places)
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")] or [done]
    found = json.loads(line.removeprefix("RESULT "))
    assert not wheel or found["version"].startswith("0.33")
    assert found["worker"] == found["alone"]
    assert found["not compiled"] != found["alone"]
    assert found["alone"]["V2 FULL_AND_PIECEWISE ALWAYS"] == "FULL_AND_PIECEWISE"
    assert found["ran"] == "ours"
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    assert decision_table(found) in page


MODES = ("FULL_AND_PIECEWISE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "NONE")


def decision_table(found):
    """The rows of docs/engines.md: what is made of each mode where attention supports all."""
    rows = []
    for name, who, runner in (("V1", "worker", "V1"), ("V2", "worker", "V2"),
                              ("V2, not compiled", "not compiled", "V2")):  # fmt: skip
        cells = [found[who][f"{runner} {mode} ALWAYS"] for mode in MODES]
        rows.append(f"| {' | '.join([name, *cells])} |\n")
    return "".join(rows)


SEEN: list[Any] = []
"""The metadata of vLLM's forward context that the op has found."""


@torch.library.custom_op("engine_tests::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    from vllm.forward_context import get_forward_context, is_forward_context_available

    SEEN.append(get_forward_context().attn_metadata if is_forward_context_available() else None)
    return x.clone()


copied.register_fake(torch.empty_like)


class Doubled(torch.nn.Module):
    def forward(self, positions):
        return torch.ops.engine_tests.copied(positions + 1) * 2 - 2


def test_steps_that_vllm_captures_or_runs_uncompiled(monkeypatch, caplog):
    """Inside a capture of vLLM none of ours begins, nor is a graph of ours replayed."""
    from piecegraph.tools.integrations import vllm as integration

    context, vllm_captures = SimpleNamespace(skip_compiled=False), True
    monkeypatch.setattr(integration, "get_forward_context", lambda: context)
    monkeypatch.setattr(integration.current_platform, "is_cuda_alike", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: vllm_captures)
    model, positions = Doubled(), torch.arange(4)
    form = integration.InputForm(positions, 4)
    config = Config(
        inputs={"positions": form.spec}, max_num_tokens=8, capture_sizes=(4, 8), compiler="eager",
        graph_mode="PIECEWISE", strategy=Lazy(), cache=False,
        splitting_ops=("engine_tests::copied",), attention={"support": "NEVER"},
    )  # fmt: skip
    prepared = prepare(model, config)
    prepared.capture(integration._no_requests)
    prepared.seal()
    step = integration.steps_through(prepared, model, {"positions": form}, prepared.dispatch)

    def modes():
        assert step(positions).tolist() == [0, 2, 4, 6]
        return [row["mode"] for row in prepared.usage.rows() for _ in range(row["count"])]

    at_startup = len(prepared.recordings())
    assert [modes(), modes()][-1] == ["NONE", "NONE"]
    assert len(prepared.recordings()) == at_startup
    vllm_captures = False
    assert "PIECEWISE" in [modes(), modes()][-1]
    assert len(prepared.recordings()) == at_startup + 1
    vllm_captures = True
    assert modes().count("NONE") >= 3
    for other in (torch.arange(9), torch.arange(4.0)):  # too many tokens, another form
        assert step(other).tolist() == step(other).tolist() == (other * 2).tolist()
    assert caplog.text.count("a step is not as it was prepared") == 2
    context.skip_compiled = True
    before = sum(row["count"] for row in prepared.usage.rows())
    assert len(modes()) == before


def test_captures_on_a_device_run_in_the_context_of_vllms_own(monkeypatch):
    """Outside of it, custom all-reduce copies each input to registered memory first."""

    from piecegraph.tools.integrations import vllm as integration

    entered: list[torch.device] = []
    monkeypatch.setattr(
        integration, "graph_capture", lambda device: nullcontext(entered.append(device))
    )
    for name in ("cuda:1", "cpu"):
        with integration.capture_context(torch.device(name)):
            pass
    assert entered == [torch.device("cuda:1")]


class Runner:
    """A model runner for vLLM's GPU worker, which writes down what is called in which order."""

    model_memory_usage, lora_config, is_pooling_model = 0, None, False

    def __init__(self, model, order):
        self.model, self.order = model, order

    def get_model(self):
        return self.model

    def profile_run(self, **options):
        from vllm.config import get_current_vllm_config
        from vllm.forward_context import set_forward_context

        self.order.append("profile run")
        with set_forward_context(None, get_current_vllm_config()):  # the latter fails outside of it
            self.model(torch.arange(32))

    def profile_cudagraph_memory(self):
        self.order.append("vLLM's estimate")
        return 1000

    def capture_model(self):
        self.order.append("vLLM's captures")
        return 2000

    def _dummy_run(self, num_tokens, **options):
        return None, None

    def _dummy_sampler_run(self, hidden_states):
        self.order.append("sampler")

    def maybe_remove_all_loras(self, config):
        pass


@pytest.mark.parametrize("given_up", [False, True])
def test_graphs_are_planned_and_captured_where_vllms_gpu_worker_does(monkeypatch, given_up):
    """Its own functions say when, with a stand-in for a device: before its monitors and the freeze
    of its heap, and before it sizes its KV cache."""
    from vllm.config import CUDAGraphMode, VllmConfig
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker import gpu_worker

    from piecegraph.tools.integrations import vllm as integration

    order: list[str] = []
    patch, gpu = monkeypatch.setattr, gpu_worker.Worker
    for name in ("determine_available_memory", "compile_or_warm_up_model"):
        patch(integration.PlatformWorker, name, getattr(gpu, name))
    for module, name in ((gpu, "_maybe_activate_jit_monitor"), (gpu_worker, "freeze_gc_heap"),
                         (gpu_worker, "enable_gpu_sync_check")):  # fmt: skip
        patch(module, name, lambda *_, name=name: order.append(name))
    profile = SimpleNamespace(after_profile=SimpleNamespace(free_memory=0), total_consumed=0,
                              transient_peak_headroom=0, non_kv_cache_memory=0)  # fmt: skip
    patch(gpu_worker, "memory_profiling", lambda *_, **__: nullcontext(profile))
    for name in ("kernel_warmup", "maybe_apply_startup_plan", "maybe_save_startup_plan"):
        patch(gpu_worker, name, lambda *_: None)
    patch(gpu_worker, "get_pp_group", lambda: SimpleNamespace(is_last_rank=True))
    patch(integration, "get_tp_group", lambda: SimpleNamespace(world_size=1))
    patch(type(integration.current_platform), "is_cpu", lambda _: False)
    patch(type(integration.current_platform), "is_cuda_alike", lambda _: True)
    patch(torch.cuda, "is_current_stream_capturing", lambda: False)
    patch(integration, "passes_of", lambda config: {})  # kernels of a GPU
    patch(gpu, "_scoped_allocator_max_split", lambda *_, **__: nullcontext())

    vllm_config = VllmConfig(
        additional_config={"piecegraph": {"compiler": "eager", "cache": False}}
    )
    compilation = vllm_config.compilation_config
    compilation.backend, compilation.splitting_ops = "eager", ["engine_tests::copied"]
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    compilation.cudagraph_capture_sizes = [4, 8]
    model = Doubled()
    worker = object.__new__(integration.Worker)
    memory = SimpleNamespace(free_memory=1 << 30, total_memory=1 << 30)
    worker.__dict__ |= {
        "vllm_config": vllm_config, "compilation_config": compilation,
        "model_config": SimpleNamespace(enforce_eager=False, seed=0, multimodal_config=None),
        "device": torch.device("cpu"), "use_v2_model_runner": False, "init_snapshot": memory,
        "requested_memory": 1 << 30, "lora_config": None,
        "model_runner": Runner(torch.nn.Sequential(model), order),
        "randomize_dummy_inputs": False, "profiler": None,
    }  # fmt: skip
    for name in ("cache", "scheduler", "parallel", "observability"):
        worker.__dict__[f"{name}_config"] = getattr(vllm_config, f"{name}_config")
    patch(integration.PlatformWorker, "load_model", lambda self, **_: None)
    patch(integration.PlatformWorker, "sleep", lambda self, level: order.append("sleep"))
    patch(integration, "compiled_module", lambda outer: outer[0])
    worker.load_model()
    recorded = integration.PreparedModel.capture
    patch(
        integration.PreparedModel,
        "capture",
        lambda *args, **kwargs: order.append("our captures") or recorded(*args, **kwargs),
    )
    available = worker.determine_available_memory()
    assert worker.refusal is None
    ours = (1 << 30) - available - 1000
    if given_up:  # by a runner, after the load
        compilation.cudagraph_mode = CUDAGraphMode.FULL
    worker.compile_or_warm_up_model()
    assert ours > 0
    assert order == [
        "profile run", "profile run", "vLLM's estimate", "vLLM's captures",
        *([] if given_up else ["our captures"]), "sampler", "_maybe_activate_jit_monitor",
        "freeze_gc_heap", "enable_gpu_sync_check",
    ]  # fmt: skip
    assert len([*worker.prepared.recordings()]) == (0 if given_up else 2)
    worker.sleep()
    assert order[-1] == "sleep"
    for rows in (8, 4):  # a step finds its own metadata, and the capture before it none
        assert len(worker.prepared.recordings()) == (0 if given_up or rows == 8 else 1)
        SEEN.clear()
        with set_forward_context({"layer": rows}, vllm_config, num_tokens=rows):
            assert model(torch.arange(rows)).tolist() == [2 * n for n in range(rows)]
        assert [each for each in SEEN if each not in (None, {"layer": rows})] == []
        assert (None in SEEN) is not given_up
        assert SEEN[-1] is not None
    assert len(worker.prepared.recordings()) == (0 if given_up else 2)
