"""Continuous batching of transformers gives the same tokens after `accelerate`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("psutil")

from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS  # noqa: E402

from piecegraph import Config, Events  # noqa: E402
from piecegraph.errors import BundleMissing, ModelNotAdaptable, ToolMissing  # noqa: E402
from piecegraph.tools.integrations.continuous_batching import accelerate  # noqa: E402

from .checkpoints import decisive, smollm2, smollm2_prompts  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")

CONFIG = Config(max_num_tokens=64, graph_mode="NONE", compiler="eager", cache=False)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES = {
    "llama": lambda t: t.LlamaConfig(**SMALL),
    "qwen3": lambda t: t.Qwen3Config(**SMALL),
    "gemma3": lambda t: t.Gemma3TextConfig(**SMALL, **SLIDING),
    "mixtral": lambda t: t.MixtralConfig(**SMALL, **EXPERTS),
    "qwen3_moe": lambda t: t.Qwen3MoeConfig(
        **SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "lfm2": lambda t: t.Lfm2Config(
        **SMALL, layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False
    ),
    "gpt2": lambda t: t.GPT2Config(
        vocab_size=256, n_embd=64, n_layer=3, n_head=4, n_positions=512, n_inner=96
    ),
}


def model_of(family: str) -> Any:
    kind = transformers.AutoModelForCausalLM
    if family == "smollm2":
        return kind.from_pretrained(**smollm2(), dtype=torch.float32).eval()
    config = FAMILIES[family](transformers)
    return decisive(kind.from_config(config, attn_implementation="sdpa")).eval()


@contextmanager
def planted(fault: str) -> Iterator[None]:
    """In transformers alone: attention gives zeros, or each step of several tokens stores another
    first row in the KV cache of the first layer."""
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    functions = transformers.AttentionInterface._global_mapping
    attend, update = functions["sdpa"], PagedAttentionCache.update

    def zeros(*args: Any, **kwargs: Any) -> Any:
        return torch.zeros_like(attend(*args, **kwargs)[0]), None

    def overwritten(self: Any, keys: Any, values: Any, layer_idx: int, kwargs: Any) -> Any:
        if layer_idx == 0 and keys.shape[2] > 1:
            keys, values = keys.clone(), values.clone()
            keys[:, :, 0], values[:, :, 0] = 3.0, 3.0
        return update(self, keys, values, layer_idx, kwargs)

    with pytest.MonkeyPatch.context() as patch:
        if fault == "attention":
            patch.setitem(functions, "sdpa", zeros)
        else:
            patch.setattr(PagedAttentionCache, "update", overwritten)
        yield


def prompts_of(model: Any) -> list[list[int]]:
    """Some are prefilled in chunks: 8 questions to the trained model, or 64 of random tokens."""
    if model.config.vocab_size > 1000:
        return smollm2_prompts(transformers.AutoTokenizer.from_pretrained(**smollm2()), 8)
    draw = torch.Generator().manual_seed(1)
    lengths = (2, 9, 33, 90) * 16
    return [torch.randint(3, 256, (length,), generator=draw).tolist() for length in lengths]


def tokens(model: Any) -> list[list[int]]:
    prompts = prompts_of(model)
    settings = transformers.GenerationConfig(
        max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    batching = transformers.ContinuousBatchingConfig(
        max_batch_tokens=64, num_blocks=256, page_size=16
    )
    made = model.generate_batch(
        prompts, generation_config=settings, continuous_batching_config=batching
    )
    return [
        made[name].generated_tokens for name in sorted(made, key=lambda n: int(n.split("_")[-1]))
    ]


@pytest.mark.parametrize("family", ["smollm2", *(each for each in FAMILIES if each != "lfm2")])
def test_tokens_are_those_of_transformers(family):
    """The comparison can fail: with a fault in transformers alone, tokens are others."""
    model = model_of(family)
    expected = tokens(model)
    for fault in ("attention", "KV row"):
        with planted(fault):
            assert tokens(model) != expected, fault
    prepared = accelerate(model, CONFIG)
    assert tokens(model) == expected
    assert sum(row["count"] for row in prepared.usage.rows()) > 8


def test_a_prepared_model_that_no_step_uses_is_named(caplog):
    """Something else takes the place of the forward that `accelerate` has set."""
    model = model_of("llama")
    prepared = accelerate(model, CONFIG)
    model.model.forward = type(model.model).forward.__get__(model.model)
    assert all(tokens(model))
    assert not prepared.usage.rows()
    assert caplog.text.count("10 steps went around the prepared model: LlamaForCausalLM") == 1


def test_a_warm_start_traces_and_compiles_nothing(tmp_path):
    expected = tokens(model_of("qwen3"))
    for warm in (False, True):
        model, events = model_of("qwen3"), Events()
        config = Config(max_num_tokens=64, graph_mode="NONE", cache_dir=tmp_path)
        prepared = accelerate(model, config, events=events)
        assert prepared.report()["cache"]["hit"] is warm
        assert (events.counters["dynamo_traces"] == 0) is warm
        assert (events.counters["inductor_compiles"] == 0) is warm
        assert tokens(model) == expected
        assert not [name for name in events.counters if name.startswith("after_seal")]


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_graphs_between_attention(family):
    expected = tokens(model_of(family))
    model = model_of(family)
    graphs = {"graph_mode": "PIECEWISE", "capture_sizes": (1, 8, 64)}
    prepared = accelerate(model, CONFIG.changed(**graphs))
    assert tokens(model) == expected
    assert {row["mode"] for row in prepared.usage.rows()} == {"PIECEWISE"}


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_steps_are_proved_and_wrong_code_leaves_service(monkeypatch, family):
    """By what `accelerate` sets: the first step is proved, and its tokens are right."""
    expected = tokens(model_of(family))
    model = model_of(family)
    prepared = accelerate(model, CONFIG)
    assert tokens(model) == expected
    shadow = prepared.report()["shadow"]
    assert (shadow["wrong"], shadow["stopped"]) == ([], None)
    assert sum(row["proved"] for row in shadow["graphs"]) >= 1

    def wrong(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(x * 1.5 if x.is_floating_point() else x for x in graph(*args))

    monkeypatch.setitem(_BACKENDS, "planted", None)
    monkeypatch.setitem(_COMPILER_FNS, "planted", wrong)
    monkeypatch.setattr(wrong, "_tags", (), raising=False)
    model = model_of(family)
    prepared = accelerate(model, CONFIG.changed(compiler="planted"))
    assert tokens(model) == expected
    (found,) = prepared.report()["shadow"]["wrong"]
    assert found["out_of_service"] == "compiled code"
    assert not prepared.compiled.traced


def test_an_older_transformers_is_refused(monkeypatch):
    """Its attention functions would update the paged cache a second time."""
    monkeypatch.setattr(transformers, "__version__", "5.23.1")
    model = model_of("llama")
    with pytest.raises(ToolMissing, match=r"5.24 or newer \(found 5.23.1\)"):
        accelerate(model, CONFIG)
    assert "forward" not in vars(model.model)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_other_calls_run_the_model_itself(family):
    model, ids = model_of(family), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).logits
        accelerate(model, Config(max_num_tokens=64, compiler="eager", cache=False))
        torch.testing.assert_close(model(ids).logits, expected)
        assert model.config._attn_implementation == "sdpa"
        generated = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 7)


@pytest.mark.parametrize(
    ("family", "changed", "error", "says"),
    [
        # it would see only the tokens of one step
        ("lfm2", {}, ModelNotAdaptable, r"layers\.0\.conv.*paged cache"),
        ("mixtral", {"cache": True, "bundle": "force"}, BundleMissing, None),
    ],
)
def test_a_start_that_is_refused_or_fails_leaves_the_model_as_it_was(family, changed, error, says):
    model, ids = model_of(family), torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        expected = model(ids).logits
        with pytest.raises(error, match=says):
            accelerate(model, CONFIG.changed(**changed))
        assert torch.equal(model(ids).logits, expected)


def test_the_example_runs(tmp_path):
    example = Path(__file__).parents[2] / "examples" / "continuous_batching.py"
    environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, env=environment
    )
    assert "the same tokens; warm start: False" in done.stdout, done.stderr
