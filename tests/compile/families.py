"""Tiny models of families of transformers, for tests: random weights, two layers, small widths.

Released configurations are in released.json, and their table in released_table.py.
"""

import inspect

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LARGEST = 5_000_000

TINY = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_words"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "emb_dim"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_inner"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 128),
    **dict.fromkeys(
        ("sliding_window", "attention_chunk_size", "local_attention", "window_size"), 8
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "hidden_size_per_layer_input"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(
        ("linear_num_key_heads", "linear_num_value_heads", "encoder_attention_heads"), 4
    ),
    **dict.fromkeys(("decoder_attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0),
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "index_topk": 4,
    "v_head_dim": 12,
    "global_head_dim": 8,
    "chunk_size": 16,
    "mamba_chunk_size": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "first_k_dense_replace": 1,
    "type_vocab_size": 2,
    "rope_dim": 8,
    "rotary_dim": 4,
}
"""Settings of a small configuration, for those that a configuration has."""
LAYERS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
)
_MAMBA2 = {"mamba_d_head": 16, "mamba_n_heads": 4}
_FEW_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_FEW_EXPERTS |= {"topk_group": 1, "n_group": 1}
_LINEAR = {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2}
OWN = {
    "bailing_hybrid": {**_LINEAR, "num_expert_group": 1, "layer_group_size": 2},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "deepseek_v2": _FEW_EXPERTS,
    "distilbert": {"dim": 32, "hidden_dim": 48},
    "dots1": {**_FEW_EXPERTS, "n_shared_experts": 1},
    "electra": {"embedding_size": 32},
    "esm": {"vocab_size": 64, "mask_token_id": 32, "pad_token_id": 1},
    "esmc": {"num_key_value_heads": 4, "head_dim": 8},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 64},
    "falcon_mamba": {"intermediate_size": 64},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {"per_layer_config": {}},
    "gemma4_unified_text": {"per_layer_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granitemoehybrid": {**_MAMBA2, "layer_types": ["mamba", "attention"]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_offset": 1},
    "kimi_linear": _LINEAR,
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "interleave_moe_layer_step": 1},
    "luke": {"entity_vocab_size": 8, "entity_emb_size": 16, "use_entity_aware_attention": False},
    "mamba": {"intermediate_size": 64},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "ministral": {"head_dim": 8},
    "mobilebert": {
        "embedding_size": 32,
        "intra_bottleneck_size": 32,
        "true_hidden_size": 32,
    },
    "nemotron": {"num_key_value_heads": 2},
    "phimoe": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 8,
        "num_hidden_layers": 3,
        "block_types": ["recurrent", "recurrent", "attention"],
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16,
        "pronunciation_vocab_size": 64,
        "shape_embed_dim": 16,
        "shape_vocab_size": 64,
    },
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "chunk_size": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"],
        "num_mem_blocks": 1,
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
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
