"""Tiny models of families of transformers, for tests: random weights, two layers, small widths.

Released configurations are in released.json, and their table in released_table.py.
"""

import copy
import inspect

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from piecegraph import ForwardContext, forward_context
from piecegraph.tools.integrations.transformers import PackedRequests

LARGEST = 5_000_000

TINY = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "d_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "head_dim"), 8),
    **dict.fromkeys(("state_size", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "index_topk": 4,
    "v_head_dim": 12,
    "chunk_size": 16,
    "n_groups": 1,
    "first_k_dense_replace": 1,
}
"""Settings of a small configuration, for those that a configuration has."""
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
OWN = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 1},
    "mamba": {"intermediate_size": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
}
"""Settings of families for which those of TINY do not fit together."""


def tiny_config(family):
    """A configuration of the family with two layers, or one for each type of layer it knows."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    fixed = {n for n in dir(kind) if isinstance(inspect.getattr_static(kind, n), property)}
    known = {n for n, value in vars(default).items() if value is not None} - fixed
    own = {name: value for name, value in TINY.items() if name in known}
    if "kv_lora_rank" in known:
        own["num_key_value_heads"] = TINY["num_attention_heads"]
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    count = max(2, len(types))
    own |= {name: count for name in LAYERS if name in known}
    if types and "layer_types" in known:
        own["layer_types"] = types if len(types) == count else types * count
    return kind(**{**own, **OWN.get(family, {})})


def own_model(family, seed=0):
    """The model with random weights and its own attention."""
    torch.manual_seed(seed)
    config = tiny_config(family)
    with torch.device("meta"):
        parameters = transformers.AutoModel.from_config(config).parameters()
    if (count := sum(parameter.numel() for parameter in parameters)) > LARGEST:
        raise ValueError(f"{count} parameters with the settings of TINY")
    model = transformers.AutoModel.from_config(config, attn_implementation="eager")
    with torch.no_grad():  # tables that transformers starts with zeros
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return model.eval().requires_grad_(False)


def positions_of(lengths):
    return torch.cat([torch.arange(length) for length in lengths])


def results(model, requests, layers=None):
    """Of each request, in one step of `model` over all of them, with `layers` or its own."""
    lengths = tuple(map(len, requests))
    context = ForwardContext(layers or model.layers, PackedRequests(lengths))
    with torch.no_grad(), forward_context(context):
        return model(torch.cat(requests), positions_of(lengths)).split(lengths)


def assert_as_alone(own, requests, found, rtol=1e-4, atol=1e-5):
    """Each request has the result of the model's own forward for it alone."""
    for ids, result in zip(requests, found, strict=True):
        with torch.no_grad():
            expected = copy.deepcopy(own)(input_ids=ids[None])[0][0]
        torch.testing.assert_close(result, expected, rtol=rtol, atol=atol)
