"""Models whose plans are recorded, and the parts of a plan that must not change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from piecegraph import Config, prepare
from piecegraph.tools.engine.attention import SPLITTING_OP
from piecegraph.tools.engine.decoder_config import DecoderConfig
from piecegraph.tools.engine.model import Decoder

from ..compile import engine_models  # noqa: F401  they add to MODELS
from ..compile.engine_parts import MODELS
from ..compile.models import MIX, Stack, X

TOKENS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}
SIZES = {"max_num_tokens": 16, "max_num_reqs": 8, "capture_sizes": (4, 16)}
SMALL = DecoderConfig(layers=3, hidden=32)


def _engine_model(name: str) -> tuple[nn.Module, dict[str, Any]]:
    model = MODELS[name]
    return model.build(), {"inputs": model.inputs, "splitting_ops": model.splits}


GOLDEN: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "equal layers, split by op": lambda: (Stack(4), {"inputs": X, "splitting_ops": MIX}),
    "one layer differs": lambda: (Stack(4, odd=1), {"inputs": X, "splitting_ops": MIX}),
    "equal layers, split by pattern": lambda: (
        Stack(3),
        {"inputs": X, "splitting_ops": ("piecegraph_test::*",)},
    ),
    "no split": lambda: _engine_model("multi_token_heads"),
    "encoder": lambda: _engine_model("vision_tower"),
    "hybrid": lambda: _engine_model("hybrid_of_two_ops"),
    "pipeline stage": lambda: _engine_model("pipeline_stage"),
    "tied embeddings": lambda: _engine_model("tied_embeddings"),
    "written input": lambda: _engine_model("cache_written_in_a_piece"),
    "reference decoder": lambda: (
        Decoder(SMALL, seed=0),
        {"inputs": TOKENS, "splitting_ops": (SPLITTING_OP,)},
    ),
}


def plan_of(name: str) -> Any:
    """The plan of a model, with code that is not compiled."""
    torch._dynamo.reset()
    model, settings = GOLDEN[name]()
    config = Config(**SIZES, **settings, graph_mode="PIECEWISE", compiler="eager", cache=False)
    return prepare(model, config).compiled.plan


def normalized(plan: Any) -> dict[str, Any]:
    """What a plan computes, and in which order, as lines of text; without how it is stored."""
    return {
        "inputs": [
            f"{item.name} {item.label} {item.dtype}{[*item.shape]} written={item.written}"
            for item in plan.inputs
        ],
        "weights": [
            f"{item.name} {item.target} {item.dtype}{[*item.shape]} strides={[*item.stride]}"
            f" written={item.written}"
            for item in plan.weights
        ],
        "symbols": [
            f"{item.name} {item.label} of {item.source}, dim {item.dim}: {item.low} to {item.high}"
            for item in plan.symbols
        ],
        "pieces": [f"{piece.nodes} nodes, sizes {[*piece.sizes]}" for piece in plan.pieces],
        "ranges": [f"{span.low} to {span.high}: {[*span.artifacts]}" for span in plan.ranges],
        "steps": [_step(step) for step in plan.steps],
        "results": [f"{item.name} {item.dtype}{[*item.shape]}" for item in plan.results],
        "structure": json.dumps(plan.structure),
        "checks": [check.expression for check in plan.checks],
        "guards": [f"{guard.expression} proved={guard.proved}" for guard in plan.guards],
    }


def _step(step: Any) -> str:
    if step.kind == "piece":
        return f"piece {step.piece}{[*step.args]} -> {[*step.outs]}"
    return f"{step.op}{json.dumps([step.args, step.kwargs])} -> {[*step.outs]}"


def digests(plan: Any) -> list[str]:
    """The content hash of each unique piece."""
    return [piece.digest for piece in plan.pieces]
