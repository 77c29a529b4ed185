"""A Hugging Face decoder with random weights; `pip install '.[hf]'`.

`PackedModel` routes the model's attention through a custom op and takes the tokens of all requests
in one row. By default the op attends to the tokens of the step only; an engine passes its own
attention, with a KV cache, as `layers`.
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
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    hf_model = AutoModel.from_config(Qwen3Config(**sizes, **heads)).eval()  # or from_pretrained

    tokens = torch.tensor([5, 6, 7, 8, 9])
    with torch.no_grad():  # two requests, of three and two tokens, one after the other
        expected = [hf_model(input_ids=t[None]).last_hidden_state[0] for t in tokens.split([3, 2])]

    model = PackedModel(hf_model)
    config = pg.Config(**model.settings, max_num_tokens=64, max_num_reqs=8, capture_sizes=(4, 8))
    prepared = pg.prepare(model, config, layers=model.layers)
    prepared.capture(lambda descriptor, mode: PackedRequests((descriptor.num_tokens,)))
    prepared.seal()

    positions = torch.tensor([0, 1, 2, 0, 1])
    batch = pg.Batch(num_tokens=5, num_reqs=2)
    decision = prepared.dispatch(batch)
    result = prepared.run(decision, tokens, positions, metadata=PackedRequests((3, 2)))
    difference = (result - torch.cat(expected)).abs().max()
    print(f"mode {decision.mode.name}, {decision.descriptor.num_tokens} rows")
    print(f"largest difference to transformers: {difference:.1e}")
    assert difference < 1e-4


if __name__ == "__main__":
    main()
