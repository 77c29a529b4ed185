"""Configurations of released models: their `config.json`, written down from memory.

What a published file leaves at the default of its class is left out here too. Weights are never
used: the table of docs/families.md is about configurations.
"""

from __future__ import annotations

from typing import Any

LLAMA3 = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3",
          "original_max_position_embeddings": 8192}  # fmt: skip


def _of(kind: str, hidden: int, inner: int, layers: int, heads: int, kv: int | None = None,
        **others: Any) -> dict[str, Any]:  # fmt: skip
    settings = {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return {**settings, **({"num_key_value_heads": kv} if kv else {}), **others}


def _rope(theta: float, **others: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **others}}


LLAMA_IDS = {"bos_token_id": 128000, "eos_token_id": 128001}
QWEN_IDS = {"bos_token_id": 151643, "eos_token_id": 151645, "rms_norm_eps": 1e-6}
BERT_IDS = {"pad_token_id": 0, "vocab_size": 30522, "max_position_embeddings": 512}
ROBERTA_IDS = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "type_vocab_size": 1,
               "max_position_embeddings": 514, "layer_norm_eps": 1e-5}  # fmt: skip


def _longrope(count: int, factor: float) -> dict[str, Any]:
    short = [1.0 + 0.02 * i for i in range(count)]
    long = [1.0 + 0.9 * i for i in range(count)]
    return {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": short,
            "long_factor": long, "factor": factor}  # fmt: skip


def _deepseek(kind: str, heads: int = 128, theta: float = 10000.0, factor: float = 40.0,
              **others: Any) -> dict[str, Any]:  # fmt: skip
    settings = {
        "vocab_size": 129280, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "bos_token_id": 0,
        "eos_token_id": 1, **_rope(
            theta, rope_type="yarn", factor=factor, beta_fast=32, beta_slow=1, mscale=1.0,
            mscale_all_dim=1.0, original_max_position_embeddings=4096,
        ),
    }  # fmt: skip
    return _of(kind, 7168, 18432, 61, heads, heads, **settings | others)


RELEASED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b": _of(
        "llama", 4096, 11008, 32, 32, vocab_size=32000, max_position_embeddings=4096
    ),
    "meta-llama/Llama-3.1-8B": _of(
        "llama", 4096, 14336, 32, 32, 8, vocab_size=128256, max_position_embeddings=131072,
        **LLAMA_IDS, **_rope(500000.0, **LLAMA3),
    ),
    "meta-llama/Llama-3.2-1B": _of(
        "llama", 2048, 8192, 16, 32, 8, vocab_size=128256, max_position_embeddings=131072,
        head_dim=64, tie_word_embeddings=True, **LLAMA_IDS,
        **_rope(500000.0, **{**LLAMA3, "factor": 32.0}),
    ),
    "meta-llama/Llama-3.3-70B": _of(
        "llama", 8192, 28672, 80, 64, 8, vocab_size=128256, max_position_embeddings=131072,
        **LLAMA_IDS, **_rope(500000.0, **LLAMA3),
    ),
    "HuggingFaceTB/SmolLM2-135M": _of(
        "llama", 576, 1536, 30, 9, 3, vocab_size=49152, max_position_embeddings=8192,
        **_rope(100000.0),
    ),
    "mistralai/Mistral-7B-v0.1": _of(
        "mistral", 4096, 14336, 32, 32, 8, vocab_size=32000, max_position_embeddings=32768,
        sliding_window=4096,
    ),
    "mistralai/Mistral-Nemo-12B": _of(
        "mistral", 5120, 14336, 40, 32, 8, head_dim=128, vocab_size=131072,
        max_position_embeddings=131072, sliding_window=None, **_rope(1000000.0),
    ),
    "mistralai/Mixtral-8x7B": _of(
        "mixtral", 4096, 14336, 32, 32, 8, vocab_size=32000, max_position_embeddings=32768,
        sliding_window=None, num_local_experts=8, num_experts_per_tok=2, **_rope(1000000.0),
    ),
    "Qwen/Qwen2.5-0.5B": _of(
        "qwen2", 896, 4864, 24, 14, 2, vocab_size=151936, max_position_embeddings=32768,
        sliding_window=32768, use_sliding_window=False, **QWEN_IDS, **_rope(1000000.0),
    ),
    "Qwen/Qwen2.5-72B": _of(
        "qwen2", 8192, 29568, 80, 64, 8, vocab_size=152064, max_position_embeddings=131072,
        use_sliding_window=False, **QWEN_IDS, **_rope(1000000.0),
    ),
    "Qwen/Qwen3-0.6B": _of(
        "qwen3", 1024, 3072, 28, 16, 8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, **QWEN_IDS, **_rope(1000000.0),
    ),
    "Qwen/Qwen3-8B": _of(
        "qwen3", 4096, 12288, 36, 32, 8, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, **QWEN_IDS, **_rope(1000000.0),
    ),
    "Qwen/Qwen3-30B-A3B": _of(
        "qwen3_moe", 2048, 6144, 48, 32, 4, head_dim=128, vocab_size=151936,
        max_position_embeddings=40960, num_experts=128, num_experts_per_tok=8,
        moe_intermediate_size=768, norm_topk_prob=True, **QWEN_IDS, **_rope(1000000.0),
    ),
    "Qwen/Qwen3-Next-80B-A3B": _of(
        "qwen3_next", 2048, 5120, 48, 16, 2, head_dim=256, vocab_size=151936,
        max_position_embeddings=262144, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, linear_num_key_heads=16,
        linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128,
        **QWEN_IDS, **_rope(10000000.0, partial_rotary_factor=0.25),
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": _of(
        "qwen2_moe", 2048, 5632, 24, 16, 16, vocab_size=151936, max_position_embeddings=8192,
        num_experts=60, num_experts_per_tok=4, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, **QWEN_IDS, **_rope(1000000.0),
    ),
    "google/gemma-2b": _of(
        "gemma", 2048, 16384, 18, 8, 1, head_dim=256, vocab_size=256000, bos_token_id=2,
        eos_token_id=1, pad_token_id=0, max_position_embeddings=8192,
    ),
    "google/gemma-2-9b": _of(
        "gemma2", 3584, 14336, 42, 16, 8, head_dim=256, vocab_size=256000, sliding_window=4096,
        query_pre_attn_scalar=256, final_logit_softcapping=30.0, attn_logit_softcapping=50.0,
        bos_token_id=2, eos_token_id=1, pad_token_id=0, max_position_embeddings=8192,
    ),
    "google/gemma-3-1b": _of(
        "gemma3_text", 1152, 6912, 26, 4, 1, head_dim=256, vocab_size=262144, sliding_window=512,
        query_pre_attn_scalar=256, max_position_embeddings=32768, bos_token_id=2, eos_token_id=1,
        pad_token_id=0,
    ),
    "google/gemma-3-27b (text)": _of(
        "gemma3_text", 5376, 21504, 62, 32, 16, head_dim=128, vocab_size=262208,
        sliding_window=1024, query_pre_attn_scalar=168, max_position_embeddings=131072,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "google/gemma-3n-E4B (text)": _of(
        "gemma3n_text", 2048, [16384] * 35, 35, 8, 2, head_dim=256, vocab_size=262400,
        vocab_size_per_layer_input=262144, hidden_size_per_layer_input=256, sliding_window=512,
        max_position_embeddings=32768, num_kv_shared_layers=15, laurel_rank=64,
        altup_num_inputs=4, activation_sparsity_pattern=[0.95] * 10 + [0.0] * 25,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "google/embeddinggemma-300m": _of(
        "gemma3_text", 768, 1152, 24, 3, 1, head_dim=256, vocab_size=262144, sliding_window=512,
        query_pre_attn_scalar=256, max_position_embeddings=2048, bos_token_id=2, eos_token_id=1,
        pad_token_id=0, use_bidirectional_attention=True,
    ),
    "google/recurrentgemma-2b": _of(
        "recurrent_gemma", 2560, 15360, 26, 10, 1, vocab_size=256000, attention_window_size=2048,
        lru_width=2560, bos_token_id=2, eos_token_id=1, pad_token_id=0,
    ),
    "microsoft/phi-2": _of(
        "phi", 2560, 10240, 32, 32, vocab_size=51200, max_position_embeddings=2048,
        bos_token_id=50256, eos_token_id=50256, **_rope(10000.0, partial_rotary_factor=0.4),
    ),
    "microsoft/Phi-3-mini-4k": _of(
        "phi3", 3072, 8192, 32, 32, 32, vocab_size=32064, max_position_embeddings=4096,
        original_max_position_embeddings=4096, sliding_window=2047, bos_token_id=1,
        eos_token_id=32000, pad_token_id=32000,
    ),
    "microsoft/Phi-3.5-mini-128k": _of(
        "phi3", 3072, 8192, 32, 32, 32, vocab_size=32064, max_position_embeddings=131072,
        original_max_position_embeddings=4096, sliding_window=262144, bos_token_id=1,
        eos_token_id=32000, pad_token_id=32000, rope_parameters=_longrope(48, 32.0),
    ),
    "microsoft/Phi-4-mini": _of(
        "phi3", 3072, 8192, 32, 24, 8, vocab_size=200064, max_position_embeddings=131072,
        original_max_position_embeddings=4096, sliding_window=262144, bos_token_id=199999,
        eos_token_id=199999, pad_token_id=199999, tie_word_embeddings=True,
        rope_parameters={**_longrope(48, 32.0), "partial_rotary_factor": 0.75},
    ),
    "zai-org/GLM-5": _of(
        "glm_moe_dsa", 6144, 12288, 78, 64, 64, vocab_size=154880, moe_intermediate_size=2048,
        n_routed_experts=256, num_experts_per_tok=8, n_group=1, topk_group=1, q_lora_rank=2048,
        kv_lora_rank=512, qk_nope_head_dim=192, qk_rope_head_dim=64, v_head_dim=256,
        first_k_dense_replace=3, index_topk=2048, index_head_dim=128, index_n_heads=32,
        max_position_embeddings=202752, **_rope(1000000.0),
    ),
    "deepseek-ai/DeepSeek-V4 (class defaults)": {"model_type": "deepseek_v4"},
    "tencent/HY-V4 (class defaults)": {"model_type": "hy_v4"},
    "skt/A.X-K2 (class defaults)": {"model_type": "axk2"},
    "meituan-longcat/LongCat-Flash": {
        "model_type": "longcat_flash", "hidden_size": 6144, "num_layers": 28,
        "num_attention_heads": 64, "vocab_size": 131072, "ffn_hidden_size": 12288,
        "expert_ffn_hidden_size": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_topk": 12,
        "n_routed_experts": 512, "zero_expert_num": 256, "routed_scaling_factor": 6.0,
        "max_position_embeddings": 131072, "bos_token_id": 1, "eos_token_id": 2,
        **_rope(10000000.0),
    },
    "jetmoe/jetmoe-8b": {
        "model_type": "jetmoe", "hidden_size": 2048, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "kv_channels": 128, "intermediate_size": 5632,
        "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "bos_token_id": 1,
        "eos_token_id": 2, **_rope(10000.0),
    },
    "microsoft/phi-4": _of(
        "phi3", 5120, 17920, 40, 40, 10, vocab_size=100352, max_position_embeddings=16384,
        original_max_position_embeddings=16384, bos_token_id=100257, eos_token_id=100265,
        pad_token_id=100349, **_rope(250000.0),
    ),
    "microsoft/Phi-3.5-MoE": _of(
        "phimoe", 4096, 6400, 32, 32, 8, vocab_size=32064, max_position_embeddings=131072,
        sliding_window=131072, num_local_experts=16, num_experts_per_tok=2, attention_bias=True,
        lm_head_bias=True, **_rope(10000.0),
    ),
    "openai/gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24,
                           "num_local_experts": 32, "eos_token_id": 200002,
                           "pad_token_id": 199999, "vocab_size": 201088},
    "openai/gpt-oss-120b": {"model_type": "gpt_oss", "num_hidden_layers": 36,
                            "num_local_experts": 128, "eos_token_id": 200002,
                            "pad_token_id": 199999, "vocab_size": 201088},
    "deepseek-ai/DeepSeek-V2-Lite": _of(
        "deepseek_v2", 2048, 10944, 27, 16, 16, vocab_size=102400, kv_lora_rank=512,
        q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, n_group=1, topk_group=1,
        moe_intermediate_size=1408, first_k_dense_replace=1, topk_method="greedy",
        max_position_embeddings=163840, bos_token_id=100000, eos_token_id=100001,
    ),
    "deepseek-ai/DeepSeek-V3": _deepseek("deepseek_v3", first_k_dense_replace=3),
    "deepseek-ai/DeepSeek-V3.2": _deepseek(
        "deepseek_v32", first_k_dense_replace=3, index_topk=2048, index_head_dim=128,
        index_n_heads=64,
    ),
    "moonshotai/Kimi-K2": _deepseek(
        "deepseek_v3", heads=64, theta=50000.0, factor=32.0, n_routed_experts=384, n_group=1,
        topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.827, vocab_size=163840,
        bos_token_id=163584, eos_token_id=163585, max_position_embeddings=131072,
    ),
    "zai-org/GLM-4-9B-0414": _of(
        "glm4", 4096, 13696, 40, 32, 2, head_dim=128, vocab_size=151552, pad_token_id=151329,
        eos_token_id=[151329, 151336, 151338], max_position_embeddings=32768,
        **_rope(10000.0, partial_rotary_factor=0.5),
    ),
    "zai-org/GLM-4.5-Air": _of(
        "glm4_moe", 4096, 10944, 46, 96, 8, head_dim=128, vocab_size=151552,
        n_routed_experts=128, num_experts_per_tok=8, n_shared_experts=1, n_group=1, topk_group=1,
        moe_intermediate_size=1408, first_k_dense_replace=1, pad_token_id=151329,
        eos_token_id=[151329, 151336, 151338], max_position_embeddings=131072,
        **_rope(1000000.0, partial_rotary_factor=0.5),
    ),
    "meta-llama/Llama-4-Scout (text)": _of(
        "llama4_text", 5120, 8192, 48, 40, 8, head_dim=128, vocab_size=202048,
        intermediate_size_mlp=16384, num_local_experts=16, interleave_moe_layer_step=1,
        attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1, use_qk_norm=True,
        max_position_embeddings=10485760, bos_token_id=200000, eos_token_id=200001,
        pad_token_id=200018, **_rope(500000.0, **{**LLAMA3, "factor": 16.0}),
    ),
    "meta-llama/Llama-4-Maverick (text)": _of(
        "llama4_text", 5120, 8192, 48, 40, 8, head_dim=128, vocab_size=202048,
        intermediate_size_mlp=16384, num_local_experts=128, interleave_moe_layer_step=2,
        attention_chunk_size=8192, floor_scale=8192, attn_scale=0.1, use_qk_norm=False,
        max_position_embeddings=1048576, bos_token_id=200000, eos_token_id=200001,
        pad_token_id=200018, **_rope(500000.0),
    ),
    "tiiuae/falcon-7b": {"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                         "num_attention_heads": 71, "vocab_size": 65024, "multi_query": True,
                         "parallel_attn": True, "bias": False, "alibi": False,
                         "bos_token_id": 11, "eos_token_id": 11},
    "tiiuae/falcon-rw-1b (ALiBi)": {"model_type": "falcon", "hidden_size": 2048,
                                    "num_hidden_layers": 24, "num_attention_heads": 32,
                                    "vocab_size": 50304, "multi_query": False,
                                    "parallel_attn": False, "bias": True, "alibi": True,
                                    "bos_token_id": 1, "eos_token_id": 2},
    "tiiuae/falcon-mamba-7b": {"model_type": "falcon_mamba", "hidden_size": 4096,
                               "num_hidden_layers": 64, "vocab_size": 65024, "state_size": 16,
                               "intermediate_size": 8192, "expand": 16, "time_step_rank": 256,
                               "bos_token_id": 0, "eos_token_id": 11, "pad_token_id": 11},
    "state-spaces/mamba-2.8b": {"model_type": "mamba", "hidden_size": 2560,
                                "num_hidden_layers": 64, "vocab_size": 50280,
                                "intermediate_size": 5120, "time_step_rank": 160,
                                "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0},
    "mistralai/Mamba-Codestral-7B": {"model_type": "mamba2", "hidden_size": 4096,
                                     "num_hidden_layers": 64, "vocab_size": 32768,
                                     "num_heads": 128, "head_dim": 64, "state_size": 128,
                                     "n_groups": 8, "bos_token_id": 0, "eos_token_id": 0,
                                     "pad_token_id": 0},
    "bigscience/bloom-560m": {"model_type": "bloom", "hidden_size": 1024, "n_layer": 24,
                              "n_head": 16, "vocab_size": 250880, "bos_token_id": 1,
                              "eos_token_id": 2, "pad_token_id": 3},
    "facebook/opt-125m": {"model_type": "opt", "hidden_size": 768, "num_hidden_layers": 12,
                          "num_attention_heads": 12, "ffn_dim": 3072, "vocab_size": 50272,
                          "max_position_embeddings": 2048, "word_embed_proj_dim": 768,
                          "bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    "facebook/opt-350m": {"model_type": "opt", "hidden_size": 1024, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "ffn_dim": 4096, "vocab_size": 50272,
                          "max_position_embeddings": 2048, "word_embed_proj_dim": 512,
                          "do_layer_norm_before": False, "bos_token_id": 2, "eos_token_id": 2,
                          "pad_token_id": 1},
    "openai-community/gpt2": {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12,
                              "vocab_size": 50257, "n_positions": 1024},
    "EleutherAI/gpt-j-6b": {"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16,
                            "rotary_dim": 64, "vocab_size": 50400, "n_positions": 2048},
    "EleutherAI/gpt-neo-125m": {"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12,
                                "num_heads": 12, "attention_types": [[["global", "local"], 6]],
                                "window_size": 256, "vocab_size": 50257},
    "EleutherAI/gpt-neox-20b": _of(
        "gpt_neox", 6144, 24576, 44, 64, vocab_size=50432, max_position_embeddings=2048,
        bos_token_id=0, eos_token_id=0, **_rope(10000.0, partial_rotary_factor=0.25),
    ),
    "bigcode/starcoder2-3b": _of(
        "starcoder2", 3072, 12288, 30, 24, 2, vocab_size=49152, max_position_embeddings=16384,
        sliding_window=4096, bos_token_id=0, eos_token_id=0, **_rope(999999.4420358813),
    ),
    "bigcode/santacoder": {"model_type": "gpt_bigcode", "n_embd": 2048, "n_layer": 24,
                           "n_head": 16, "n_inner": 8192, "n_positions": 2048,
                           "vocab_size": 49280, "multi_query": True, "bos_token_id": 49152,
                           "eos_token_id": 49152},
    "Salesforce/codegen-350M": {"model_type": "codegen", "n_embd": 1024, "n_layer": 20,
                                "n_head": 16, "rotary_dim": 32, "vocab_size": 51200},
    "stabilityai/stablelm-2-1_6b": _of(
        "stablelm", 2048, 5632, 24, 32, 32, vocab_size=100352, max_position_embeddings=4096,
        use_qkv_bias=True, bos_token_id=100257, eos_token_id=100257,
        **_rope(10000.0, partial_rotary_factor=0.25),
    ),
    "allenai/OLMo-2-7B": _of(
        "olmo2", 4096, 11008, 32, 32, 32, vocab_size=100352, max_position_embeddings=4096,
        eos_token_id=100257, pad_token_id=100277, **_rope(500000.0),
    ),
    "allenai/OLMoE-1B-7B": _of(
        "olmoe", 2048, 1024, 16, 16, 16, vocab_size=50304, max_position_embeddings=4096,
        num_experts=64, num_experts_per_tok=8, eos_token_id=50279, pad_token_id=1,
    ),
    "HuggingFaceTB/SmolLM3-3B": _of(
        "smollm3", 2048, 11008, 36, 16, 4, vocab_size=128256, max_position_embeddings=65536,
        bos_token_id=128000, eos_token_id=128012, pad_token_id=128004, **_rope(5000000.0),
    ),
    "ibm-granite/granite-3.1-8b": _of(
        "granite", 4096, 12800, 40, 32, 8, vocab_size=49155, max_position_embeddings=131072,
        attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22,
        logits_scaling=16.0, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        **_rope(10000000.0),
    ),
    "ai21labs/Jamba-v0.1": _of(
        "jamba", 4096, 14336, 32, 32, 8, vocab_size=65536, num_experts=16, num_experts_per_tok=2,
        mamba_dt_rank=256, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        use_mamba_kernels=False,
    ),
    "ibm-ai-platform/Bamba-9B": _of(
        "bamba", 4096, 14336, 32, 32, 8, vocab_size=128256, mamba_n_heads=128, mamba_d_head=64,
        mamba_d_state=128, mamba_n_groups=1, attn_layer_indices=[9, 18, 27],
        max_position_embeddings=262144,
    ),
    "LiquidAI/LFM2-1.2B": _of(
        "lfm2", 2048, 12288, 16, 32, 8, vocab_size=65536, max_position_embeddings=128000,
        conv_L_cache=3, layer_types=[
            "full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)
        ], bos_token_id=1, eos_token_id=7, pad_token_id=0,
    ),
    "LGAI-EXAONE/EXAONE-4.0-32B": _of(
        "exaone4", 5120, 27392, 64, 40, 8, vocab_size=102400, max_position_embeddings=131072,
        sliding_window=4096, sliding_window_pattern=4, bos_token_id=1, eos_token_id=361,
        pad_token_id=0, **_rope(1000000.0, **{**LLAMA3, "factor": 16.0}),
    ),
    "baidu/ERNIE-4.5-0.3B": _of(
        "ernie4_5", 1024, 3072, 18, 16, 2, head_dim=128, vocab_size=103424, bos_token_id=1,
        eos_token_id=2, pad_token_id=0, max_position_embeddings=131072, **_rope(500000.0),
    ),
    "CohereLabs/c4ai-command-r-v01": _of(
        "cohere", 8192, 22528, 40, 64, 64, vocab_size=256000, max_position_embeddings=8192,
        bos_token_id=5, eos_token_id=255001, pad_token_id=0, **_rope(8000000.0),
    ),
    "CohereLabs/c4ai-command-r7b": _of(
        "cohere2", 4096, 14336, 32, 32, 8, head_dim=128, vocab_size=256000, sliding_window=4096,
        max_position_embeddings=8192, bos_token_id=5, eos_token_id=255001, pad_token_id=0,
        **_rope(50000.0),
    ),
    "nvidia/Minitron-4B": _of(
        "nemotron", 3072, 9216, 32, 24, 8, head_dim=128, vocab_size=256000,
        max_position_embeddings=4096, bos_token_id=2, eos_token_id=3,
        **_rope(10000.0, partial_rotary_factor=0.5),
    ),
    "mosaicml/mpt-7b (ALiBi)": {"model_type": "mpt", "d_model": 4096, "n_heads": 32,
                                "n_layers": 32, "vocab_size": 50432, "max_seq_len": 2048},
    "facebook/xglm-564M": {"model_type": "xglm", "d_model": 1024, "ffn_dim": 4096,
                           "num_layers": 24, "attention_heads": 16, "vocab_size": 256008,
                           "max_position_embeddings": 2048, "bos_token_id": 0,
                           "eos_token_id": 2, "pad_token_id": 1},
    "ByteDance-Seed/Seed-OSS-36B": _of(
        "seed_oss", 5120, 27648, 64, 80, 8, head_dim=128, vocab_size=155136, bos_token_id=0,
        eos_token_id=2, pad_token_id=1, max_position_embeddings=524288, **_rope(10000000.0),
    ),
    "google-bert/bert-base-uncased": _of("bert", 768, 3072, 12, 12, **BERT_IDS),
    "google-bert/bert-large-cased": _of(
        "bert", 1024, 4096, 24, 16, **{**BERT_IDS, "vocab_size": 28996}
    ),
    "FacebookAI/roberta-base": _of("roberta", 768, 3072, 12, 12, vocab_size=50265, **ROBERTA_IDS),
    "FacebookAI/xlm-roberta-large": _of(
        "xlm-roberta", 1024, 4096, 24, 16, vocab_size=250002, **ROBERTA_IDS
    ),
    "BAAI/bge-m3": _of(
        "xlm-roberta", 1024, 4096, 24, 16, vocab_size=250002,
        **{**ROBERTA_IDS, "max_position_embeddings": 8194},
    ),
    "almanach/camembert-base": _of(
        "camembert", 768, 3072, 12, 12, vocab_size=32005, **{**ROBERTA_IDS, "bos_token_id": 5,
                                                             "eos_token_id": 6},
    ),
    "facebook/data2vec-text-base": _of(
        "data2vec-text", 768, 3072, 12, 12, vocab_size=50265, **ROBERTA_IDS
    ),
    "microsoft/mpnet-base": _of(
        "mpnet", 768, 3072, 12, 12, vocab_size=30527, max_position_embeddings=514,
        relative_attention_num_buckets=32, bos_token_id=0, eos_token_id=2, pad_token_id=1,
    ),
    "distilbert/distilbert-base-uncased": {"model_type": "distilbert", "dim": 768,
                                           "hidden_dim": 3072, "n_layers": 6, "n_heads": 12,
                                           "vocab_size": 30522, "pad_token_id": 0},
    "albert/albert-base-v2": _of(
        "albert", 768, 3072, 12, 12, embedding_size=128, vocab_size=30000, bos_token_id=2,
        eos_token_id=3, pad_token_id=0,
    ),
    "google/electra-base": _of("electra", 768, 3072, 12, 12, embedding_size=768, **BERT_IDS),
    "microsoft/deberta-v3-base": _of(
        "deberta-v2", 768, 3072, 12, 12, vocab_size=128100, max_position_embeddings=512,
        relative_attention=True, position_buckets=256, norm_rel_ebd="layer_norm",
        share_att_key=True, pos_att_type=["p2c", "c2p"], max_relative_positions=-1,
        position_biased_input=False, pad_token_id=0, type_vocab_size=0,
    ),
    "answerdotai/ModernBERT-base": {"model_type": "modernbert"},
    "facebook/esm2_t6_8M": _of(
        "esm", 320, 1280, 6, 20, vocab_size=33, mask_token_id=32, pad_token_id=1,
        position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False,
        max_position_embeddings=1026,
    ),
    "facebook/esm2_t33_650M": _of(
        "esm", 1280, 5120, 33, 20, vocab_size=33, mask_token_id=32, pad_token_id=1,
        position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False,
        max_position_embeddings=1026,
    ),
    "google/bigbird-roberta-base": _of(
        "big_bird", 768, 3072, 12, 12, vocab_size=50358, max_position_embeddings=4096,
        block_size=64, num_random_blocks=3, attention_type="block_sparse", bos_token_id=1,
        eos_token_id=2, pad_token_id=0, sep_token_id=66,
    ),
    "allenai/longformer-base-4096": _of(
        "longformer", 768, 3072, 12, 12, vocab_size=50265, attention_window=[512] * 12,
        sep_token_id=2, **{**ROBERTA_IDS, "max_position_embeddings": 4098},
    ),
    "YituTech/conv-bert-base": _of("convbert", 768, 3072, 12, 12, **BERT_IDS),
    "google/fnet-base": {"model_type": "fnet", "vocab_size": 32000, "bos_token_id": 1,
                         "eos_token_id": 2, "pad_token_id": 3},
    "google-t5/t5-base (encoder)": {"model_type": "t5", "class": "T5EncoderModel",
                                    "d_model": 768, "d_ff": 3072, "d_kv": 64, "num_layers": 12,
                                    "num_heads": 12, "vocab_size": 32128, "pad_token_id": 0,
                                    "eos_token_id": 1},
    "google/umt5-xxl (encoder)": {"model_type": "umt5", "class": "UMT5EncoderModel",
                                  "d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_layers": 24,
                                  "num_heads": 64, "vocab_size": 256384, "pad_token_id": 0,
                                  "eos_token_id": 1,
                                  "feed_forward_proj": "gated-gelu"},
}  # fmt: skip
"""By the name under which it is published."""


def released_model(name: str, dtype: Any) -> Any:
    """The model class and configuration, without memory for weights."""
    import torch
    import transformers

    settings = {"dtype": dtype, **RELEASED[name]}
    kind = settings.pop("class", None)
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        if kind is not None:
            return getattr(transformers, kind)(config).to(dtype)
        return transformers.AutoModel.from_config(config, dtype=dtype)
