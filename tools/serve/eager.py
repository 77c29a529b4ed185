"""Runs the model as it is, without the library: the truth that prepared steps are compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ... import ForwardContext, forward_context
from ..engine.kv_cache import LayerCache
from ..engine.metadata import AttentionMetadata


def run_eagerly(
    model: torch.nn.Module,
    layers: Mapping[str, LayerCache],
    metadata: AttentionMetadata,
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """The model's output for just the real rows; writes into `layers`."""
    with forward_context(ForwardContext(layers, metadata.unpadded())), torch.no_grad():
        output: torch.Tensor = model(*inputs)
    return output
