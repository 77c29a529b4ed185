"""A model with its own attention op and KV cache, served decode step by decode step.

Each request owns one row of the KV cache. Attention is a custom op, and the model is split there.
Its metadata is in persistent buffers, so that it can also be part of a FULL graph.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import piecegraph as pg

HIDDEN, MAX_LEN, MAX_REQS, LAYERS = 32, 16, 4, 2
PADDING_ROW = MAX_REQS  # a row of the KV cache that padding may write to


class LayerCache:
    """Keys and values of one layer, and the metadata of the step, shared by all layers."""

    def __init__(self, rows: Tensor, positions: Tensor) -> None:
        self.keys = torch.zeros(MAX_REQS + 1, MAX_LEN, HIDDEN)
        self.values = torch.zeros(MAX_REQS + 1, MAX_LEN, HIDDEN)
        self.rows, self.positions = rows, positions


library = torch.library.Library("own_model", "DEF")
library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer) -> ()"
)
torch.library.register_fake("own_model::attention", lambda *args: None, lib=library)


def attention(query: Tensor, key: Tensor, value: Tensor, output: Tensor, layer: str) -> None:
    """Decode attention: each row is the next token of one request."""
    cache = pg.get_forward_context().layers[layer]
    rows, positions = cache.rows[: len(query)], cache.positions[: len(query)]
    cache.keys[rows, positions] = key
    cache.values[rows, positions] = value
    scores = torch.einsum("rh,rth->rt", query, cache.keys[rows]) / HIDDEN**0.5
    future = torch.arange(MAX_LEN) > positions[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    output.copy_(torch.einsum("rt,rth->rh", weights, cache.values[rows]))


library.impl("attention", attention, "CompositeExplicitAutograd")


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        output = torch.empty_like(x)
        torch.ops.own_model.attention(query, key, value, output, self.name)
        x = x + output
        return x + self.down(nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(f"layer {i}") for i in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Engine:
    """The smallest engine: it decodes one token for each of its requests per step."""

    def __init__(self, model: nn.Module) -> None:
        self.rows = torch.full((MAX_REQS,), PADDING_ROW)
        self.positions = torch.zeros(MAX_REQS, dtype=torch.int64)
        layers = {f"layer {i}": LayerCache(self.rows, self.positions) for i in range(LAYERS)}
        config = pg.Config(
            splitting_ops=("own_model::attention",),
            inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
            max_num_tokens=MAX_REQS,
            max_num_reqs=MAX_REQS,
            attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
            capture_sizes=(1, 2, 4),
        )
        self.prepared = pg.prepare(model, config, layers=layers)
        self.prepared.capture(self.metadata_of_a_dummy_batch)
        self.prepared.seal()

    def metadata_of_a_dummy_batch(
        self, descriptor: pg.BatchDescriptor, mode: pg.RuntimeMode
    ) -> None:
        """A dummy batch is padding only: it must not write to a row of a request."""
        self.rows.fill_(PADDING_ROW)
        self.positions.zero_()

    def step(self, requests: dict[int, int], x: Tensor) -> tuple[str, Tensor]:
        """One token for each request; `requests` maps its row of the KV cache to its position."""
        count = len(requests)
        batch = pg.Batch(count, count, is_decode=True, query_len=1)
        decision = self.prepared.dispatch(batch)
        self.rows.fill_(PADDING_ROW)  # metadata for the padded batch
        self.positions.zero_()
        self.rows[:count] = torch.tensor(list(requests))
        self.positions[:count] = torch.tensor(list(requests.values()))
        result = self.prepared.run(decision, x)
        return decision.mode.name, result.clone()  # the next step overwrites it


def main() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    engine = Engine(model)
    tokens = torch.randn(8, 3, HIDDEN)

    print("request 0 alone, then with two others:")
    alone = [engine.step({0: position}, tokens[position, :1])[1] for position in range(8)]
    for position in range(8):
        requests = {1: position, 2: position, 3: position}
        mode, together = engine.step(requests, tokens[position])
        torch.testing.assert_close(together[:1], alone[position], rtol=1e-4, atol=1e-4)
    print(f"  8 steps, equal; the last one ran in mode {mode}")
    for row in engine.prepared.report()["dispatch"]:
        print(" ", row)


if __name__ == "__main__":
    main()
