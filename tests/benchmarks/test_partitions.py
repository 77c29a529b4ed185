"""What a step does is counted by the native functions that it calls."""

import torch

from piecegraph.benchmarks import partitions


def test_calls_of_generated_code_are_counted():
    x = torch.ones(2, 2)
    counts = partitions._work(lambda: torch.addmm(x, torch.mm(x, x), x))
    assert counts == {"kernels": 0, "products": 2, "buffers": 0, "views": 0}
