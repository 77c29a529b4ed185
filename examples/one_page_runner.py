"""Decode graphs of a small engine on one page: sizes, buffers, capture, pad, replay, free.

`DecodeGraphs` is what engines call a graph runner, made of public parts. The forward is captured as
it is: without a compiler. The model and the engine below it are just large enough to use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import piecegraph as pg
from piecegraph.dispatch import default_capture_sizes

VOCAB, HIDDEN, MAX_LEN, MAX_REQS, LAYERS = 64, 32, 24, 8, 2
PADDING_ROW = MAX_REQS  # a row of the KV cache that belongs to no request


@dataclass
class Request:
    """Its prompt, the length at which it ends, and its row of the KV cache."""

    prompt: Sequence[int]
    length: int
    row: int
    tokens: list[int] = field(default_factory=list)


class DecodeGraphs:
    """One FULL graph for each padded number of requests."""

    def __init__(self, model: Decoder) -> None:
        # sizes: 1, 2, 4, then in steps of 8
        sizes = default_capture_sizes(MAX_REQS, MAX_REQS)
        # buffers: a graph reads its inputs where they were when it was captured
        self.buffers = {
            name: torch.zeros(MAX_REQS, dtype=torch.int64) for name in ("ids", "rows", "positions")
        }
        config = pg.Config(
            compile=False,
            graph_mode="FULL_DECODE_ONLY",
            attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
            capture_sizes=sizes,
            inputs=dict.fromkeys(self.buffers, "int64[num_tokens]"),
            steps={"padding": {"rows": PADDING_ROW}},
            max_num_tokens=MAX_REQS,
            max_num_reqs=MAX_REQS,
        )
        self.prepared = pg.prepare(model, config, input_buffers=self.buffers)
        # a graph reads the KV cache by address, too: from now on a cache that moves is an error
        for index, layer in enumerate(model.layers):
            self.prepared.watch(f"keys of layer {index}", layer.keys)
            self.prepared.watch(f"values of layer {index}", layer.values)

    def capture(self) -> None:
        """Record all graphs, largest first, on dummy batches; none is captured after this."""
        self.prepared.capture()
        self.prepared.seal()

    def can_use_graph(self, requests: Sequence[Request]) -> bool:
        return self.prepared.dispatch(self.batch(requests)).mode is pg.RuntimeMode.FULL

    def replay(self, requests: Sequence[Request]) -> Tensor:
        """Scores of the next token of each request: the smallest graph that fits, padded."""
        count = len(requests)
        decision = self.prepared.dispatch(self.batch(requests))
        self.buffers["ids"][:count] = torch.tensor([each.tokens[-1] for each in requests])
        self.buffers["rows"][:count] = torch.tensor([each.row for each in requests])
        self.buffers["positions"][:count] = torch.tensor([len(e.tokens) - 1 for e in requests])
        # pad: the rows behind these get their padding value, so they write to PADDING_ROW
        return self.prepared.run(decision, *(buffer[:count] for buffer in self.buffers.values()))

    def batch(self, requests: Sequence[Request]) -> pg.Batch:
        return pg.Batch(len(requests), len(requests), is_decode=True, query_len=1)

    def free(self) -> None:
        self.prepared.close()


class Layer(nn.Module):
    """Attention over a KV cache with one row for each request, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.keys = torch.zeros(MAX_REQS + 1, MAX_LEN, HIDDEN)
        self.values = torch.zeros(MAX_REQS + 1, MAX_LEN, HIDDEN)

    def forward(self, x: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        self.keys[rows, positions] = key
        self.values[rows, positions] = value
        scores = torch.einsum("rh,rth->rt", query, self.keys[rows]) / HIDDEN**0.5
        future = torch.arange(MAX_LEN) > positions[:, None]
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + torch.einsum("rt,rth->rh", weights, self.values[rows])
        return x + self.down(nn.functional.silu(self.up(x)))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, rows, positions)
        return self.head(x)


def serve(graphs: DecodeGraphs, requests: Sequence[Request]) -> list[list[int]]:
    """Decode prompts token by token, then greedily; a request leaves at its length."""
    for request in requests:
        request.tokens = list(request.prompt[:1])
    while running := [each for each in requests if len(each.tokens) < each.length]:
        assert graphs.can_use_graph(running)
        best = graphs.replay(running).argmax(-1).tolist()
        for request, token in zip(running, best, strict=True):
            rest = request.prompt[len(request.tokens) :]
            request.tokens.append(rest[0] if rest else token)
    return [request.tokens for request in requests]


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    graphs = DecodeGraphs(model)
    graphs.capture()
    prompts = [5, 9, 2], [7], [1, 2, 3, 4], [11, 3], [8]
    requests = [Request(prompt, 8 + 3 * row, row) for row, prompt in enumerate(prompts)]
    together = serve(graphs, requests)
    assert together == [serve(graphs, [request])[0] for request in requests]
    print(f"{len(requests)} requests, batched and alone: equal tokens")
    for row in graphs.prepared.report()["dispatch"]:
        print(f"{row['mode']} {row['num_tokens']}: {row['count']} steps")
    graphs.free()


if __name__ == "__main__":
    main()
