"""One timed start of a model in its own process: `python -m … WAY LAYERS CACHE`.

Prints `{"import_torch": s, "model": s, "ready": s, "phases": {name: s}}`. A model is ready when it
can serve. With `torch.compile` the first call compiles the model, and that call is timed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

HIDDEN = 256
MAX_NUM_TOKENS = 2048


def main(way: str, layers: int, folder: Path) -> dict[str, Any]:
    """Start once: `piecegraph`, `ahead` (build the libraries), or `torch.compile`."""
    began = time.perf_counter()
    importlib.import_module("torch")
    imported = time.perf_counter()
    from ..engine.decoder_config import DecoderConfig
    from ..engine.model import Decoder

    model = Decoder(DecoderConfig(layers=layers, hidden=HIDDEN), seed=0).eval()
    built = time.perf_counter()
    checked: dict[str, Any] = {}
    if way == "torch.compile":
        phases = _torch_compile(model)
    else:
        phases, checked = _piecegraph(way, model, folder)
    return {
        "import_torch": imported - began,
        "model": built - imported,
        "ready": time.perf_counter() - built,
        "phases": phases,
        **checked,
    }


def _piecegraph(way: str, model: Any, folder: Path) -> tuple[dict[str, float], dict[str, Any]]:
    from ... import Config, Events, compile_ahead, prepare

    config = Config(
        splitting_ops=("piecegraph_reference::paged_attention",),
        inputs={"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"},
        max_num_tokens=MAX_NUM_TOKENS,
        cache_dir=folder,
    )
    events = Events()
    if way == "ahead":
        compile_ahead(model, config, events=events)
    else:
        prepare(model, config, events=events).close()
    phases: dict[str, float] = {}
    for span in events.spans:
        phases[span.name] = phases.get(span.name, 0.0) + span.seconds
    hits = [event.facts for event in events.named("bundle") if event.facts["hit"]]
    if not hits:
        return phases, {}
    milliseconds = 1000 * phases["bundle.conditions"]
    return phases, {"conditions_ms": milliseconds, "num_conditions": hits[0]["conditions"]}


def _torch_compile(model: Any) -> dict[str, float]:
    import torch

    from ... import BatchDescriptor, ForwardContext, RuntimeMode, forward_context
    from ..engine.kv_cache import allocate_layer_caches
    from ..engine.metadata import MetadataBuffers

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
    compiled: Any = torch.compile(model, fullgraph=True, dynamic=True)
    tokens = torch.zeros(17, dtype=torch.int64)
    with torch.no_grad(), forward_context(ForwardContext(layers, metadata, None, 17)):
        compiled(tokens, torch.arange(17))
    return {}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
