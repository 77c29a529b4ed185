"""Which families of transformers the adapter serves: a table with one row for each.

python tests/compile/families.py RESULTS.json [FAMILY…]

Each family of decoders and text encoders that has a configuration small enough to run here is
prepared with random weights and compared with its own attention, alone at several sizes and packed
with other requests, on the replay backend with poisoned memory. Results are added to a JSON file,
from which `--table` prints the table of docs/families.md.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import inspect
import json
import re
import signal
import textwrap
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from piecegraph import Batch, Config, ReplayBackend, ReplayOptions, RuntimeMode, prepare
from piecegraph.errors import PiecegraphError
from piecegraph.tools.integrations.transformers import PackedModel, PackedRequests

SIZES = (1, 2, 3, 7, 16, 33, 64)
PACKED = ((3, 1, 4), (20, 1, 9, 12))
TOLERANCE = 1e-4
SECONDS = 150
LARGEST = 5_000_000

TINY: dict[str, Any] = {
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
_FEW_EXPERTS: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2}
_FEW_EXPERTS |= {"topk_group": 1, "n_group": 1}
_LINEAR = {"linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2}
OWN: dict[str, dict[str, Any]] = {
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


def families() -> list[str]:
    """Model types with a decoder or a text encoder, as transformers lists them. The text model of
    one with several modalities is a type of its own."""
    decoders = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    encoders = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    known = {*decoders, *encoders} & {*CONFIG_MAPPING.keys()}
    return sorted(f for f in known if "vision_config" not in CONFIG_MAPPING[f].sub_configs)


def tiny_config(family: str) -> Any:
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


def own_model(family: str, seed: int = 0) -> Any:
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


def try_family(
    family: str, compiler: str = "eager", cache_dir: Path | None = None
) -> dict[str, Any]:
    """One row: the outcome, the largest difference, or why the family is refused.

    With `cache_dir`, families with equal pieces share their code.
    """
    began = time.perf_counter()
    row: dict[str, Any] = {"family": family, "compiler": compiler}
    try:
        with limited(SECONDS):
            own = own_model(family)
            if not own.config.is_encoder_decoder:
                own(input_ids=torch.arange(5)[None])
    except Exception as error:
        return {**row, "outcome": "no small configuration", "reason": _first_line(error)}
    try:
        with limited(SECONDS), torch.no_grad():
            row |= _compared(own, compiler, cache_dir)
    except PiecegraphError as error:
        row |= {
            "outcome": "refused",
            "error": type(error).__name__,
            "reason": _without_folders(error),
        }
    except Exception as error:
        kind = type(error).__name__
        row |= {"outcome": "failed", "error": kind, "reason": _first_line(error)}
    finally:
        torch.compiler.reset()
    return {**row, "seconds": round(time.perf_counter() - began, 1)}


def _compared(own: Any, compiler: str, cache_dir: Path | None) -> dict[str, Any]:
    model = PackedModel(copy.deepcopy(own))
    config = Config(
        **model.settings,
        max_num_tokens=max(SIZES),
        max_num_reqs=4,
        capture_sizes=(4, 64),
        graph_mode="PIECEWISE",
        compiler=compiler,
        cache=cache_dir is not None,
        cache_dir=cache_dir,
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
    prepared = prepare(model, config, backend=backend, layers=model.layers)
    prepared.capture(lambda descriptor, mode: PackedRequests((descriptor.num_tokens,)))
    modes = set()
    worst = 0.0
    for lengths in [*((size,) for size in SIZES), *PACKED]:
        requests = [torch.randint(3, 60, (length,)) for length in lengths]
        places = [torch.arange(length) for length in lengths]
        batch = Batch(sum(lengths), len(lengths))
        decision = prepared.dispatch(batch)
        modes.add(decision.mode)
        result = prepared.run(
            decision, torch.cat(requests), torch.cat(places), metadata=PackedRequests(lengths)
        )
        for tokens, positions, part in zip(requests, places, result.split(lengths), strict=True):
            expected = own(input_ids=tokens[None], position_ids=positions[None])[0][0]
            worst = max(worst, _difference(part, expected))
    outcome = "equal" if worst <= TOLERANCE else "wrong"
    if modes != {RuntimeMode.PIECEWISE}:
        outcome += " (NONE)"
    mixers = sorted({type(mixer.module).__name__ for mixer in model.layers.values()})
    return {"outcome": outcome, "difference": worst, "mixers": mixers}


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30))


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError in this thread after some seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


def _without_folders(error: BaseException) -> str:
    """The message with the places of files relative to the package they are in."""
    return re.sub(r"(?<=at )/\S*?/(?=transformers/|tools/)", "", str(error))


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: first all that are equal, then those that are not, with the reason."""
    by = {(row["family"], row["compiler"]): row for row in rows if row["family"] in families()}
    eager = [row for (_, compiler), row in by.items() if compiler == "eager"]
    tried = [row for row in eager if row["outcome"] != "no small configuration"]
    others = sorted({row["family"] for row in eager} - {row["family"] for row in tried})
    equal = [row for row in tried if row["outcome"].startswith("equal")]
    inductor = [f for (f, c), r in by.items() if c == "inductor" and r["outcome"] == "equal"]
    compiled = f", {len(inductor)} of them under Inductor too" if inductor else ""
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}: {len(tried)} families, "
        f"{len(equal)} equal{compiled}.",
        "",
        *textwrap.wrap(f"Without a small configuration here: {', '.join(others)}.", 140),
        "",
        "| family | result | largest difference | layers as mixers, or why it is refused |",
        "|---|---|---|---|",
    ]
    for row in sorted(tried, key=lambda r: (not r["outcome"].startswith("equal"), r["family"])):
        difference = f"{row['difference']:.0e}" if "difference" in row else ""
        why = row.get("reason") or ", ".join(row.get("mixers", ()))
        why = why.replace("|", "/").replace("\n", " ")
        mark = ", Inductor" if row["family"] in inductor else ""
        lines.append(f"| {row['family']} | {row['outcome']}{mark} | {difference} | {why} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--compiler", default="eager")
    parser.add_argument("--cache-dir", type=Path)
    parser.add_argument("--table", action="store_true")
    given = parser.parse_intermixed_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows = json.loads(given.results.read_text()) if given.results.exists() else []
    if given.table:
        print(table(rows))
        return
    done = {(row["family"], row["compiler"]) for row in rows}
    for family in given.families or families():
        if (family, given.compiler) in done and not given.families:
            continue
        row = try_family(family, given.compiler, given.cache_dir)
        rows = [r for r in rows if (r["family"], r["compiler"]) != (family, given.compiler)]
        rows.append(row)
        given.results.write_text(json.dumps(rows, indent=1))
        print(row["family"], row["outcome"], row.get("difference", ""), row.get("reason", ""))


if __name__ == "__main__":
    main()
