"""A small model under any strategy, served on the replay backend with everything poisoned.

It is traced once for all tests and not compiled; each test gets its own prepared model.
"""

import pytest
import torch
from torch import nn

from piecegraph import GraphMode, get_forward_context

from ..conftest import Served, compile_once, prepare_on_replay


def scale(x, out):
    context = get_forward_context()
    out.copy_(x * context.layers["scale"])


class Model(nn.Module):
    """x -> (x + 1) * 3 * 2 + 1, the factor 3 by a splitting op."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x):
        y = x + self.shift
        out = torch.empty_like(y)
        torch.ops.strategy_tests.scale(y, out)
        return out * 2 + 1


def expected(x):
    return (x + 1) * 3 * 2 + 1


def call_in_steps(served, call):
    """Steps without a graph, captures and warm-up runs call it with their input."""
    code = served.prepared._core.steps.code
    stitched = code.call
    code.call = lambda x: (call(x), stitched(x))[1]


@pytest.fixture(scope="session")
def compiled(temporary_op):
    op = temporary_op("strategy_tests::scale", "(Tensor x, Tensor(a!) out) -> ()", scale)
    inputs = {"x": "float32[num_tokens, 4]"}
    return compile_once(
        Model(), splitting_ops=(op,), inputs=inputs, max_num_tokens=2048, max_num_reqs=2048
    )


@pytest.fixture
def make(compiled):
    def make_served(
        sizes=(1, 2, 4, 8), *, mode=GraphMode.FULL_AND_PIECEWISE, options=None, **settings
    ):
        base, model = compiled
        layers, config = {"scale": torch.tensor(3.0)}, base.changed(**settings)
        prepared = prepare_on_replay(model, config, mode, sizes, layers, options or {})
        return Served(prepared, expected)

    return make_served
