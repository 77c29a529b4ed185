"""Rotary frequencies that a model chooses in each call, chosen once for what is served.

`longrope` has other frequencies for a sequence beyond the original positions, and `dynamic` has
others for each length beyond them. A step has sequences of many lengths and keys of earlier steps,
so engines choose once, by the longest sequence that they serve. A forward that makes them in each
call, on the host, is given those of before the first.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration import setting

CHOSEN = "default"
"""Of a module whose frequencies are settled: its forward computes none."""


def settle_rope(model: nn.Module, max_model_len: int | None = None) -> None:
    """Give each rotary embedding of `model` the frequencies of a sequence of `max_model_len`
    tokens, by default as many as its configuration allows. Idempotent for the same length."""
    for module in model.modules():
        for layer_type, rope_type in _chosen_in_calls(module):
            _settle(module, layer_type, rope_type, max_model_len)
        if _makes_in_calls(module):
            _make_once(module, max_model_len)


def _chosen_in_calls(module: Any) -> Iterator[tuple[str | None, str]]:
    """The layer types (None: all) of a rotary embedding that computes frequencies in calls."""
    settled: dict[str | None, str] = getattr(module, "settled_rope_types", {})
    rope_type = getattr(module, "rope_type", None)
    types = rope_type if isinstance(rope_type, dict) else {None: rope_type}
    for layer_type, name in {**types, **settled}.items():
        if isinstance(name, str) and ("dynamic" in name or name == "longrope"):
            yield layer_type, name


def _settle(module: Any, layer_type: str | None, rope_type: str, length: int | None) -> None:
    of_layer = {} if layer_type is None else {"layer_type": layer_type}
    name = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
    buffer = getattr(module, name)
    length = length or setting(module.config, "max_position_embeddings")
    with torch.no_grad():
        frequencies, _ = ROPE_INIT_FUNCTIONS[rope_type](
            module.config, buffer.device, seq_len=length, **of_layer
        )
        buffer.copy_(frequencies)
    module.settled_rope_types = {**getattr(module, "settled_rope_types", {}), layer_type: rope_type}
    if layer_type is None:
        module.rope_type = CHOSEN
    else:
        module.rope_type = {**module.rope_type, layer_type: CHOSEN}


def _makes_in_calls(module: Any) -> bool:
    """Whether the forward of a rotary embedding calls the function that makes frequencies."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return hasattr(module, "rope_init_fn") and code is not None and "rope_init_fn" in code.co_names


def _make_once(module: Any, length: int | None) -> None:
    """As its own forward does, which asks for no length but of the scaling."""
    if not hasattr(module, "made_by"):
        module.made_by, module.own_config = module.rope_init_fn, module.config
    frequencies, scaling = module.made_by(module.own_config)
    parameters = module.own_config.rope_parameters
    if parameters["rope_type"] != CHOSEN:
        length = length or setting(module.own_config, "max_position_embeddings")
        longer = length > parameters["original_max_position_embeddings"]
        scaling = parameters["long_mscale" if longer else "short_mscale"]
        module.config = copy.deepcopy(module.own_config)
        module.config.rope_parameters["rope_type"] = CHOSEN
    module.made_frequencies = frequencies.to(module.inv_freq.device), scaling
    module.rope_init_fn = MethodType(_made, module)


def _made(module: Any, *_: Any, **__: Any) -> tuple[Any, float]:
    frequencies: tuple[Any, float] = module.made_frequencies
    return frequencies
