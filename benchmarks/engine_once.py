"""One start of a real engine in its own process: `python engine_once.py ENGINE WAY MODEL FOLDER`.

ENGINE is `vllm` or `transformers`. WAY is `piecegraph`, `engine` (compiled as the engine does),
`eager`, or `wrapped`: piecegraph with norms and activations as ops of vLLM's own, as on a GPU.
MODEL is JSON. FOLDER is for its files; vLLM's cache has its path in its keys. Writes lines
of JSON: when the engine is ready, the seconds until then and until its first token; for each number
of requests that it reads, tokens per second; at the end, its peak memory.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

Generate = Callable[[Sequence[list[int]], int], int]
"""Generates a number of tokens for each prompt and returns how many it made in all."""

VOCABULARY = 1024
MAX_NUM_TOKENS = 512
MAX_NUM_REQS = 16
NEW_TOKENS = 64
PROMPT = 24
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}


def main(name: str, way: str, model: dict[str, Any], folder: Path, results: TextIO) -> None:
    """Start, generate one token, then serve as many requests as each line asks for."""

    def say(**facts: Any) -> None:
        print(json.dumps(facts), file=results, flush=True)

    start = {"vllm": _vllm, "transformers": _transformers}[name]
    with start(way, _model_config(model), folder) as (generate, began):
        ready = time.perf_counter() - began
        generate([_prompt(0)], 1)
        first_token = time.perf_counter() - began
        version = importlib.import_module(name).__version__
        say(ready=ready, first_token=first_token, version=version)
        for line in sys.stdin:
            prompts = [_prompt(number) for number in range(int(line))]
            began = time.perf_counter()
            num_tokens = generate(prompts, NEW_TOKENS)
            say(tokens_per_second=num_tokens / (time.perf_counter() - began))
    say(peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def _prompt(number: int) -> list[int]:
    return [3 + (31 * number + 7 * place) % (VOCABULARY - 3) for place in range(PROMPT)]


def _model_config(model: dict[str, Any]) -> dict[str, Any]:
    """A model with `layers` layers of width `hidden`, a Qwen3 if it has no `family`."""
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": model["hidden"],
        "intermediate_size": 2 * model["hidden"],
        "num_hidden_layers": model["layers"],
        "num_attention_heads": model["hidden"] // 64,
        "num_key_value_heads": model["hidden"] // 128,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **FAMILIES[model.get("family", "qwen3")],
    }


@contextmanager
def _vllm(way: str, config: dict[str, Any], folder: Path) -> Iterator[tuple[Generate, float]]:
    """Ready when `LLM(…)` returns; the import of vLLM is not in it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm: Any = importlib.import_module("vllm")
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 1e4}))
    worker = {"worker_cls": "piecegraph.tools.integrations.vllm.Worker"}
    prepared = way in ("piecegraph", "wrapped")
    if way == "wrapped":
        _wrap_operators()
    began = time.perf_counter()
    llm = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=MAX_NUM_TOKENS,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_num_seqs=MAX_NUM_REQS,
        kv_cache_memory_bytes=1 << 28,
        enable_prefix_caching=False,
        enforce_eager=way == "eager",
        **(worker if prepared else {}),
    )
    if prepared and (refusal := llm.collective_rpc("piecegraph_report")[0]["refusal"]):
        raise SystemExit(refusal)

    def generate(prompts: Sequence[list[int]], count: int) -> int:
        sampling = vllm.SamplingParams(
            max_tokens=count, temperature=0, detokenize=False, ignore_eos=True
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return sum(len(each.outputs[0].token_ids) for each in outputs)

    yield generate, began


def _wrap_operators() -> None:
    """What vLLM decides where it has a GPU; it decides after the worker was made."""
    wrap = importlib.import_module("vllm.ir").set_default_torch_wrap
    worker = importlib.import_module("piecegraph.tools.integrations.vllm").Worker
    load = worker.load_model

    def load_wrapped(self: Any, **options: Any) -> None:
        wrap(True)
        load(self, **options)

    worker.load_model = load_wrapped


@contextmanager
def _transformers(
    way: str, config: dict[str, Any], folder: Path
) -> Iterator[tuple[Generate, float]]:
    """Ready after a prefill and a decode step, in which transformers compiles.

    One manager serves all requests, as in a server: `generate_batch` starts and stops one each
    time, with a collection of all garbage in both, which would take most of a small model's time.
    """
    import torch

    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config), attn_implementation="sdpa"
    ).eval()
    batching = transformers.ContinuousBatchingConfig(
        max_batch_tokens=MAX_NUM_TOKENS,
        num_blocks=256,
        page_size=16,
        allow_block_sharing=False,
        default_compile_level=1 if way == "engine" else 0,
    )
    settings = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    began = time.perf_counter()
    if way == "piecegraph":
        from piecegraph import Config
        from piecegraph.tools.integrations.continuous_batching import accelerate

        accelerate(model, Config(max_num_tokens=MAX_NUM_TOKENS, graph_mode="NONE"))
    with model.continuous_batching_context_manager(
        generation_config=settings, continuous_batching_config=batching, timeout=5
    ) as manager:

        def generate(prompts: Sequence[list[int]], count: int) -> int:
            manager.add_requests(list(prompts), max_new_tokens=count)
            made, left = 0, len(prompts)
            while left:
                result = manager.get_result(timeout=1)
                if result is None and not manager.is_running():
                    raise SystemExit("the manager stopped")
                if result is not None and result.is_finished():
                    made += len(result.generated_tokens)
                    left -= 1
            return made

        generate([_prompt(0)], 2)
        yield generate, began


if __name__ == "__main__":
    # engines log to standard output
    with os.fdopen(os.dup(1), "w") as stream:
        os.dup2(2, 1)
        main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), Path(sys.argv[4]), stream)
