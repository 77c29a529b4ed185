"""One timed start of a model in its own process: `WAY LAYERS CACHE [MODEL [VERIFY]]`.

MODEL is `reference`, the decoder of the reference engine, or `hugging_face`, a narrow Llama.
Prints `{"import_torch": s, "model": s, "ready": s, "phases": {name: s}}`. A model is ready when it
can serve. With `torch.compile` the first call compiles the model, and that call is timed. `served`
also prints `traced` and `switch`, the seconds until the model was traced and until compiled code
served, and what steps took until then beside those of the eager model alone: `tracing_over_eager`,
the median while a thread imports Dynamo and traces, `longest_tracing_s`, and `speed_compiling`, the
share of the steps per second while workers compile. One core is left to the workers. VERIFY is a
value of `cache.verify_bundle`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HIDDEN = 256
MAX_NUM_TOKENS = 2048


def main(
    way: str, layers: int, folder: Path, named: str = "reference", verify: str = "off"
) -> dict[str, Any]:
    """Start once: `piecegraph`, `ahead` (libraries), `served`, `torch.compile` or `regional`."""
    began = time.perf_counter()
    importlib.import_module("torch")
    imported = time.perf_counter()
    model, settings = {"reference": _reference, "hugging_face": _hugging_face}[named](layers)
    built = time.perf_counter()
    measured: dict[str, Any] = {}
    if way in ("torch.compile", "regional"):
        phases = _torch_compile(model, by_layer=way == "regional")
    else:
        settings |= {"cache_dir": folder, "cache": {"verify_bundle": verify}}
        phases, measured = _piecegraph(way, model, settings, built)
    ready = measured.pop("ready", time.perf_counter() - built)
    return {
        "import_torch": imported - began,
        "model": built - imported,
        "ready": ready,
        "phases": phases,
        **measured,
    }


def _reference(layers: int) -> tuple[Any, dict[str, Any]]:
    from piecegraph.tools.engine.decoder_config import DecoderConfig
    from piecegraph.tools.engine.model import Decoder

    return Decoder(DecoderConfig(layers=layers, hidden=HIDDEN), seed=0).eval(), {
        "splitting_ops": ("piecegraph_reference::paged_attention",),
        "inputs": {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"},
        "max_num_tokens": MAX_NUM_TOKENS,
    }


def _hugging_face(layers: int) -> tuple[Any, dict[str, Any]]:
    transformers: Any = importlib.import_module("transformers")
    from piecegraph.tools.integrations.transformers import INPUTS, SPLITTING_OP, PackedModel

    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_NUM_TOKENS,
    )
    own = transformers.AutoModel.from_config(config, attn_implementation="eager")
    return PackedModel(own.eval().requires_grad_(False)), {
        "splitting_ops": (SPLITTING_OP,),
        "inputs": INPUTS,
        "max_num_tokens": MAX_NUM_TOKENS,
    }


def _piecegraph(
    way: str, model: Any, settings: dict[str, Any], began: float
) -> tuple[dict[str, float], dict[str, Any]]:
    from piecegraph import Config, Events, compile_ahead, prepare

    config = Config(**settings, bundle="serve" if way == "served" else "use")
    events, measured = Events(), dict[str, Any]()
    if way == "ahead":
        compile_ahead(model, config, events=events)
    elif way == "served":
        return _served(model, config, began)
    else:
        started = time.perf_counter()
        prepared = prepare(model, config, events=events)
        ended = time.perf_counter()
        measured = {"ready": ended - began, "prepare_ms": 1000 * (ended - started)}
        num_conditions = _number_of_conditions(prepared.compiled.conditions)
        prepared.close()
    phases: dict[str, float] = {}
    for span in events.spans:
        phases[span.name] = phases.get(span.name, 0.0) + span.seconds
    hits = [event.facts for event in events.named("bundle") if event.facts["hit"]]
    if way == "ahead" or not hits:
        return phases, measured
    return phases, {
        **measured,
        "conditions_ms": 1000 * phases["bundle.conditions"],
        "num_conditions": num_conditions,
        "compiler_imported": not {"torch._dynamo", "torch._inductor"}.isdisjoint(sys.modules),
    }


def _number_of_conditions(data: Any) -> int:
    """How many conditions a check looks at."""
    counts: list[int] = []
    for conditions, below in data["nodes"]:  # inner nodes come first
        counts.append(len(conditions) + sum(counts[number] for _, number in below))
    total: int = sum(counts[number] for number in data["roots"].values())
    return total + len(data["same"]) + len(data["environment"])


def _served(model: Any, config: Any, began: float) -> tuple[dict[str, float], dict[str, Any]]:
    """Serve uncompiled while a thread traces and workers compile, until compiled code serves."""
    import torch

    from piecegraph import Batch, ForwardContext, forward_context, prepare
    from piecegraph.runtime.core.records import BackgroundPhase

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    layers, metadata, tokens = _step_of(model)
    prepared = prepare(model, config, layers=layers)
    ready = time.perf_counter() - began
    batch, positions = Batch(len(tokens), 1), torch.arange(len(tokens))

    def phases() -> dict[str, float]:
        return {each.phase: each.seconds for each in prepared.records.of(BackgroundPhase)}

    tracing, compiling = list[float](), list[float]()
    while not prepared.compiled.traced:
        steps = compiling if "compile" in phases() else tracing
        steps.append(_seconds(lambda: prepared(tokens, positions, batch=batch, metadata=metadata)))
    compiling.pop()  # the switch
    report = prepared.report()["background"]
    prepared.close()
    with torch.no_grad(), forward_context(ForwardContext(layers, metadata, None, len(tokens))):
        eager = [_seconds(lambda: model(tokens, positions)) for _ in range(100)]
    return {}, {
        "ready": ready,
        "switch": report["switch"]["seconds"],
        "pause_ms": report["switch"]["ms"],
        "traced": phases()["compile"],
        "tracing_over_eager": median(tracing) / median(eager),
        "longest_tracing_s": max(tracing),
        "speed_compiling": len(compiling) / sum(compiling) * sum(eager) / len(eager),
    }


def _seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _torch_compile(model: Any, by_layer: bool) -> dict[str, float]:
    import torch

    from piecegraph import ForwardContext, forward_context

    layers, metadata, tokens = _step_of(model)
    compiled: Any = model
    if by_layer:  # the name of a layer is in its trace, so each is compiled
        for layer in model.layers:
            layer.compile(fullgraph=True, dynamic=True, recompile_limit=len(model.layers))
    else:
        compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad(), forward_context(ForwardContext(layers, metadata, None, len(tokens))):
        compiled(tokens, torch.arange(len(tokens)))
    return {}


def _step_of(model: Any) -> tuple[dict[str, Any], Any, Any]:
    """A KV cache by layer, and metadata and token ids of one step."""
    import torch

    from piecegraph import BatchDescriptor, RuntimeMode
    from piecegraph.tools.engine.kv_cache import allocate_layer_caches
    from piecegraph.tools.engine.metadata import MetadataBuffers

    config = model.config
    layers = allocate_layer_caches(
        model.layer_names,
        num_blocks=2,
        block_size=16,
        num_kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    buffers = MetadataBuffers(max_rows=32, max_blocks=1, device=torch.device("cpu"))
    metadata = buffers.padding(BatchDescriptor(17), RuntimeMode.PIECEWISE)
    return layers, metadata, torch.zeros(17, dtype=torch.int64)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])))
