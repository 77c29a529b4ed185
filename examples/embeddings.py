"""One model with two call forms: ids of text, or rows of embeddings, such as those of an image.

`pip install '.[hf]'`. There is one trace for each form; pieces that are equal in both are compiled
once, and the next start loads all of it from one bundle. A step is of one form.
"""

from __future__ import annotations

import torch
from transformers import AutoModel, Qwen3Config

import piecegraph as pg
from piecegraph.tools.integrations.transformers import (
    PackedModel,
    PackedRequests,
)


def main() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf_model = AutoModel.from_config(Qwen3Config(**sizes, **heads)).eval()  # or from_pretrained
    ids, image = torch.tensor([5, 6, 7, 8, 9]), torch.randn(3, 32)
    with torch.no_grad():
        rows = hf_model.get_input_embeddings()(ids)
        rows[1:4] = image  # the places of the image in the prompt
        expected = [
            hf_model(input_ids=ids[None]).last_hidden_state[0],
            hf_model(inputs_embeds=rows[None]).last_hidden_state[0],
        ]

    model = PackedModel(hf_model)
    settings = {**model.settings, "inputs": model.call_forms()}
    config = pg.Config(**settings, max_num_tokens=64, max_num_reqs=8, capture_sizes=(4, 8))
    prepared = pg.prepare(model, config, layers=model.layers)
    prepared.capture(lambda descriptor, mode: PackedRequests((descriptor.num_tokens,)))
    prepared.seal()

    positions, batch = torch.arange(5), pg.Batch(num_tokens=5, num_reqs=1)
    request = PackedRequests((5,))
    results = [
        prepared(ids, positions, batch=batch, metadata=request),
        prepared(None, positions, inputs_embeds=rows, batch=batch, metadata=request),
    ]
    report = prepared.report()
    modes = ", ".join(f"{row['mode']} {row['num_tokens']}" for row in report["dispatch"])
    difference = max(float((a - b).abs().max()) for a, b in zip(results, expected, strict=True))
    pieces, traces = report["pieces"], report["counters"]["dynamo_traces"]
    print(f"steps in {modes}; largest difference to transformers: {difference:.1e}")
    print(f"{traces} traces, {pieces['unique']} unique pieces of {pieces['total']}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
