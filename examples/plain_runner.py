"""The decode graphs of one_page_runner.py written by hand with torch.cuda.CUDAGraph, on a GPU.

The same six jobs with the same model and engine, to read side by side. What this one leaves to its
reader's care, and the other checks, is in comments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from one_page_runner import MAX_REQS, PADDING_ROW, DecodeGraphs, Decoder, Request, serve
from torch import Tensor

SIZES = (1, 2, 4, 8)


class PlainDecodeGraphs:
    """One graph for each padded number of requests."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        # rows that a step does not fill keep an older request's row: they must be reset, or padding
        # writes to its KV cache
        self.buffers = {
            "ids": torch.zeros(MAX_REQS, dtype=torch.int64),
            "rows": torch.full((MAX_REQS,), PADDING_ROW),
            "positions": torch.zeros(MAX_REQS, dtype=torch.int64),
        }
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.results: dict[int, Tensor] = {}

    def capture(self) -> None:
        """Capture all graphs, largest first, so that the others fit into its memory."""
        pool = torch.cuda.graph_pool_handle()
        for size in reversed(SIZES):
            inputs = [buffer[:size] for buffer in self.buffers.values()]
            self.model(*inputs)  # what allocates or compiles at its first call must do so before
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.results[size] = self.model(*inputs)
            self.graphs[size] = graph
        # a weight or KV cache that is replaced from now on is not noticed: the graph reads the old

    def can_use_graph(self, requests: Sequence[Request]) -> bool:
        return len(requests) <= SIZES[-1]

    def replay(self, requests: Sequence[Request]) -> Tensor:
        """Scores of the next token of each request: the smallest graph that fits, padded."""
        count = len(requests)
        size = next(size for size in SIZES if size >= count)
        self.buffers["ids"][:count] = torch.tensor([each.tokens[-1] for each in requests])
        self.buffers["rows"][:count] = torch.tensor([each.row for each in requests])
        self.buffers["rows"][count:size] = PADDING_ROW
        self.buffers["positions"][:count] = torch.tensor([len(e.tokens) - 1 for e in requests])
        self.graphs[size].replay()
        return self.results[size][:count]  # overwritten by the next step

    def free(self) -> None:
        self.graphs.clear()
        self.results.clear()


def main() -> None:
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    model = Decoder().eval().requires_grad_(False)
    prompts = [5, 9, 2], [7], [1, 2, 3, 4], [11, 3], [8]
    requests = [Request(prompt, 8 + 3 * row, row) for row, prompt in enumerate(prompts)]
    tokens = []
    for graphs in (DecodeGraphs(model), PlainDecodeGraphs(model)):
        graphs.capture()
        tokens.append(serve(graphs, requests))
        graphs.free()
    assert tokens[0] == tokens[1]
    print(f"{len(requests)} requests through both runners: equal tokens")


if __name__ == "__main__":
    main()
