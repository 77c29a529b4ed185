"""Continuous batching of transformers through piecegraph; `pip install '.[hf]' psutil`."""

from __future__ import annotations

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    Qwen3Config,
)

from piecegraph import Config
from piecegraph.tools.integrations.continuous_batching import accelerate


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3Config(**sizes, **heads)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()

    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    settings = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(max_batch_tokens=32, num_blocks=16, page_size=16)

    def generate() -> list[list[int]]:
        made = model.generate_batch(
            prompts, generation_config=settings, continuous_batching_config=batching
        )
        return [result.generated_tokens for result in made.values()]

    expected = generate()
    prepared = accelerate(model, Config(max_num_tokens=32, graph_mode="NONE"))  # the one line
    assert generate() == expected
    steps = sum(row["count"] for row in prepared.usage.rows())
    print(f"{steps} steps, the same tokens; warm start: {prepared.report()['cache']['hit']}")


if __name__ == "__main__":
    main()
