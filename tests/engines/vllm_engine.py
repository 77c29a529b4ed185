"""Runs vLLM engines in one process: `python vllm_engine.py FOLDER JOBS`.

JOBS is a list in JSON: each job has a `family`, and may have `settings` of piecegraph (without them
vLLM runs alone) and options of `LLM` in `engine`. Prints a line of JSON for each.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # two ranks run on one core too
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions for workers: planted faults
}
os.environ.setdefault("PROMETHEUS_MULTIPROC_DIR", tempfile.mkdtemp())  # workers inherit it

import torch
from checkpoints import decisive, smollm2_prompts, write_smollm2
from prometheus_client import generate_latest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from torch._dynamo import register_backend
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from vllm import LLM, ModelRegistry, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.forward_context import get_forward_context
from vllm.ir import set_default_torch_wrap
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.moss_audio import MossQwen3ForCausalLM
from vllm.sampling_params import StructuredOutputsParams
from vllm.sequence import IntermediateTensors
from vllm.v1.metrics.prometheus import get_prometheus_registry

import piecegraph
from piecegraph.tools.integrations import vllm as piecegraph_worker

MODELS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
SMALL = MODELS["small"]
CHOICES = ("Paris", "Lyon", "blue", "red", "hot", "a river", "the sun", "a number", "not known")
KINDS: list[dict[str, Any]] = [
    {},
    {"logprobs": 2},
    {"prompt_logprobs": 1},
    {"temperature": 0.8, "seed": 1, "n": 4},
    {"temperature": 0.8, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 3, "min_p": 0.1, "logprobs": 1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.2},
    {"logit_bias": {7: 5.0}},
    {"allowed_token_ids": [*range(300, 3000)]},
    {"bad_words": [" the", " is", "The"]},
    {"ignore_eos": False, "stop_token_ids": [28], "min_tokens": 3},
    {"ignore_eos": False, "stop": ["."], "include_stop_str_in_output": True},
    {"ignore_eos": False, "max_tokens": 12},
    {"max_tokens": 1},
    {"max_tokens": 1, "logprobs": 5},
    {"structured_outputs": {"regex": "[a-z]{3,9} [a-z]{3,9} [a-z]{3,9}"}},
    {"structured_outputs": {"choice": ["it is " + word for word in CHOICES]}},
    {"structured_outputs": {"json": {"type": "string", "minLength": 12}}},
    {"structured_outputs": {"grammar": 'root ::= "(" [a-zA-Z ]{8,20} ")"'}},
]
"""Settings of requests that ask vLLM's sampler for something else than the others."""


def prompts(family: str, folder: Path) -> list[dict[str, list[int]]]:
    """8 questions to the trained model; or 64 requests of which a third share a prefix that is
    longer than a step, and others are short."""
    if family == "smollm2":
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [{"prompt_token_ids": ids} for ids in smollm2_prompts(tokenizer, 8)]
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(3, 500) for _ in range(count)]

    shared = tokens(140)
    own = (1, 5, 17, 60)
    return [
        {"prompt_token_ids": (shared if i % 3 == 0 else []) + tokens(own[i % 4])} for i in range(64)
    ]


class DeepstackForCausalLM(MossQwen3ForCausalLM):
    """vLLM's decoder of MOSS-Audio. As there, a step has tensors for its first layers only if some
    token of it asks for them: here each third id, whose embedding they are."""

    def forward(self, input_ids: Any, positions: Any, **more: Any) -> Any:
        asks, added = input_ids % 3 == 0, None
        if get_forward_context().attn_metadata is not None and asks.any():
            rows = self.model.embed_input_ids(input_ids) * asks.unsqueeze(1)
            names = ("deepstack_input_embeds_0", "deepstack_input_embeds_1")
            added = IntermediateTensors({name: rows * n for n, name in enumerate(names, 1)})
        return self.model(input_ids, positions, deepstack_input_embeds=added, **more)


ModelRegistry.register_model("DeepstackForCausalLM", DeepstackForCausalLM)


def as_embeddings(requests: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """`requests`, every second one by its rows of the embedding, which are none of a token."""
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    return [
        {"prompt_embeds": table[each["prompt_token_ids"]] * 1.1} if number % 2 else each
        for number, each in enumerate(requests)
    ]


def sampling_of(kind: dict[str, Any]) -> SamplingParams:
    greedy = {"max_tokens": 6, "temperature": 0, "detokenize": "stop" in kind, "ignore_eos": True}
    if structured := kind.get("structured_outputs"):
        own = {"structured_outputs": StructuredOutputsParams(**structured)}
        kind = {"max_tokens": 12, "ignore_eos": False, **own}
    return SamplingParams(**{**greedy, **kind})


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of bytes: pooling models must have one, also for prompts of token ids."""
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate([*letters, "<s>", "</s>"])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(folder)


def adapter(folder: Path) -> LoRARequest:
    """A LoRA adapter with random weights for the query, key, value and output projections."""
    draw = torch.Generator().manual_seed(0)
    hidden, width = SMALL["hidden_size"], SMALL["head_dim"]
    outputs = {
        "q_proj": (hidden, SMALL["num_attention_heads"] * width),
        "v_proj": (hidden, SMALL["num_key_value_heads"] * width),
        "o_proj": (SMALL["num_attention_heads"] * width, hidden),
    }
    weights = {}
    for layer in range(SMALL["num_hidden_layers"]):
        for name, (rows, columns) in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(8, rows, generator=draw)
            weights[f"{place}.lora_B.weight"] = torch.randn(columns, 8, generator=draw)
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": list(outputs)}
    (folder / "adapter_config.json").write_text(json.dumps({**facts, "bias": "none"}))
    return LoRARequest("adapter", 1, str(folder))


def write_weights(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    kind = AutoModel if config.model_type == "bert" else AutoModelForCausalLM
    decisive(kind.from_config(config)).save_pretrained(folder)


def plant(worker: Any, fault: str) -> None:
    """In vLLM alone: attention gives zeros, or each step of several tokens overwrites the last row
    that it has written to the KV cache of each layer."""
    layers = worker.vllm_config.compilation_config.static_forward_context
    kind = type(next(layer.impl for layer in layers.values() if hasattr(layer, "impl")))
    own = kind.forward

    def forward(self: Any, layer: Any, *tensors: Any, **more: Any) -> Any:
        result = own(self, layer, *tensors, **more)
        cache, metadata = tensors[3], tensors[4]
        if fault == "attention":
            result.zero_()
        elif metadata is not None and len(metadata.slot_mapping) > 1:
            row = int(metadata.slot_mapping[-1])
            cache[row // cache.shape[2], :, row % cache.shape[2]] = 3.0
        return result

    kind.forward = forward
    worker.planted = lambda: setattr(kind, "forward", own)


def noticed(
    llm: Any, made: Sequence[Any], generate: Callable[[], Any], faults: Sequence[str]
) -> dict[str, list[int]]:
    """For each fault, the requests whose results from vLLM alone are others than in `made`."""
    found = {}
    for fault in faults:
        llm.reset_prefix_cache()
        llm.collective_rpc(plant, args=(fault,))
        pairs = zip(made, generate(), strict=True)
        found[fault] = [number for number, (one, two) in enumerate(pairs) if one != two]
        llm.collective_rpc(lambda worker: worker.planted())
    return found


def opaque(worker: Any) -> list[str]:
    """vLLM's own ops that the compiled pieces call as they are."""
    prepared = worker.prepared
    names = {name for piece in prepared.compiled.pieces for name in getattr(piece, "ops", ())}
    return sorted(name for name in names if name.startswith("vllm_ir::"))


def wrapping(kind: Any) -> None:
    """Norms and activations are ops of vLLM's own from the next start on, as on a GPU."""
    load = kind.load_model

    def wrapped(self: Any, **options: Any) -> None:
        kind.load_model = load
        set_default_torch_wrap(True)
        load(self, **options)

    kind.load_model = wrapped


@register_backend(name="planted")
def wrong_code(graph: Any, inputs: Any) -> Any:
    return lambda *args: tuple(x * 1.5 if x.is_floating_point() else x for x in graph(*args))


def fail_once(cls: Any) -> None:
    run = cls.run

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        cls.run = run
        raise RuntimeError("the first step fails")

    cls.run = fail


def generated(llm: LLM, job: dict[str, Any], folder: Path) -> list[Any]:
    """The tokens of each request, or its embedding, then the tokens of one prompt for each kind."""
    requests = prompts(job["family"], folder / job["family"])
    options = job.get("engine", {})
    if options.get("enable_prompt_embeds"):
        requests = as_embeddings(requests, folder / job["family"])
    if options.get("runner") == "pooling":
        return [each.outputs.embedding for each in llm.embed(requests, use_tqdm=False)]
    lora = [adapter(folder / "adapter"), None] * 32 if options.get("enable_lora") else None
    outputs = llm.generate(requests, sampling_of({}), use_tqdm=False, lora_request=lora)
    for kind in KINDS if job.get("kinds") else ():
        outputs += llm.generate(requests[1], sampling_of(kind), use_tqdm=False)
    return [_facts(output) for output in outputs]


def _facts(output: Any) -> list[Any]:
    """Tokens, and those with the highest logprobs, of each of its sequences."""
    positions = [
        *(output.prompt_logprobs or ()),
        *(p for o in output.outputs for p in o.logprobs or ()),
    ]
    ranked = [[*each] for each in positions if each]
    return [list(each.token_ids) for each in output.outputs] + ranked


def verified(worker: Any) -> bool | str:
    """What the verification beside the steps of a warm start found."""
    return worker.prepared.wait_until_verified(120)  # type: ignore[no-any-return]


def run(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Start an engine, generate, and report."""
    model = folder / job["family"]
    model.mkdir(exist_ok=True)
    options = {**MODELS["engine"], **job.get("engine", {})}
    if job["family"] == "smollm2":
        options["skip_tokenizer_init"] = False  # for structured output
    else:
        (model / "config.json").write_text(
            json.dumps({**SMALL, **MODELS["families"][job["family"]]})
        )
    if not options["skip_tokenizer_init"] and job["family"] != "smollm2":
        write_tokenizer(model)
    if not (model / "model.safetensors").exists():
        (write_smollm2 if job["family"] == "smollm2" else write_weights)(model)
    if (settings := job.get("settings")) is not None:
        options["worker_cls"] = "piecegraph.tools.integrations.vllm.Worker"
        options["additional_config"] = {"piecegraph": settings}
    if job.get("capacity"):  # vLLM finds it out
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
    if job.get("verifies"):  # most tests turn it off
        os.environ.pop("PIECEGRAPH_OFF", None)
    if job.get("wrapped"):
        wrapping(piecegraph_worker.Worker)
    if job.get("first step fails"):
        fail_once(piecegraph.PreparedModel)
    began = time.perf_counter()
    llm = LLM(model=str(model), **options)
    ready = time.perf_counter() - began
    if job.get("goes around"):
        worker = llm.llm_engine.model_executor.driver_worker.worker
        del worker.model_runner.get_model().model.forward
    made = generated(llm, job, folder)
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    result: dict[str, Any] = {"ready": ready, "made": made, "blocks": blocks}
    if job.get("sleeps"):
        llm.collective_rpc("sleep")
        llm.collective_rpc("wake_up")
        result["after sleep"] = generated(llm, job, folder)
    if job.get("planted"):
        result["noticed"] = noticed(llm, made, partial(generated, llm, job, folder), job["planted"])
    if job.get("wrapped"):
        result["opaque"] = llm.collective_rpc(opaque)[0]
    if job.get("verifies"):
        result["verified"] = llm.collective_rpc(verified)[0]
    if settings is not None:
        reports = llm.collective_rpc("piecegraph_report")
        result["report"] = reports[0]
        result["refusals"] = [report["refusal"] for report in reports]
        result["explained"] = len(llm.collective_rpc("piecegraph_explain", args=("md",))[0])
        result["metrics"] = llm.collective_rpc("piecegraph_metrics")[0]
        result["served_metrics"] = generate_latest(get_prometheus_registry()).decode()
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return result


if __name__ == "__main__":
    faulthandler.enable()  # vLLM has handlers of its own, without Python's stack
    for each in json.loads(sys.argv[2]):
        print("RESULT", json.dumps(run(each, Path(sys.argv[1]))), flush=True)
