"""Sizes with one declared name are one symbol, even if the model never combines them."""

import pytest
import torch
from torch import nn

from piecegraph.compile.ir.config import DynamicShapes
from piecegraph.errors import InputMismatch

from .models import MIX

pytestmark = [
    pytest.mark.compile,
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

DECLARED = {"x": "float32[num_tokens, 8]", "y": "float32[num_tokens, 8]"}


class Apart(nn.Module):
    def forward(self, x, y):
        return x * 2, y.view(y.shape[0], 1, -1) + 1


class NoResult(nn.Module):
    """The sizes meet in a piece that returns nothing; another has no use at all."""

    def forward(self, x, y):
        out = torch.empty_like(y)
        torch.ops.piecegraph_test.mix(y, out, "layer")
        out.add_(x)
        torch.ops.piecegraph_test.mix(out, out, "layer")
        x.view(x.shape[0], 1, -1)
        return out


@pytest.mark.parametrize("shapes", DynamicShapes)
def test_one_name_is_one_symbol_that_every_input_must_have(compiled, shapes):
    made = compiled(Apart(), inputs=DECLARED, tracing={"dynamic_shapes": shapes})
    assert [symbol.label for symbol in made.plan.symbols] == ["num_tokens"]
    assert [item.shape for item in made.plan.inputs] == [("s0", 8), ("s0", 8)]
    assert [tuple(out.shape) for out in made(torch.rand(5, 8), torch.rand(5, 8))] == [
        (5, 8),
        (5, 1, 8),
    ]
    with pytest.raises(InputMismatch, match="'y'"):
        made(torch.rand(8, 8), torch.rand(4, 8))


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(each, marks=[pytest.mark.heavy] * (each is not DynamicShapes.UNBACKED))
        for each in DynamicShapes
    ],
)
def test_a_piece_without_results_is_compiled_for_the_sizes_of_the_trace(compiled, shapes):
    made = compiled(
        NoResult(),
        inputs=DECLARED,
        tracing={"dynamic_shapes": shapes},
        splitting_ops=MIX,
        compiler="inductor",
        max_num_tokens=64,
    )
    for size in (1, 7, 64):
        x, y = torch.rand(size, 8), torch.rand(size, 8)
        torch.testing.assert_close(made(x, y), NoResult()(x, y))


class OnlySized(nn.Module):
    """Reads nothing of `y` but its sizes, of which one is compared."""

    def forward(self, x, y):
        return x * y.shape[0] + (torch.arange(8) < y.shape[1]), y.shape[1]


ONLY_SIZED = {
    "the same": "float32[num_tokens, 8]",
    "fixed": "float32[3, 8]",
}


@pytest.mark.parametrize("shapes", DynamicShapes)
@pytest.mark.parametrize("form", ONLY_SIZED)
def test_an_input_of_which_only_the_sizes_are_read_gives_them(compiled, shapes, form):
    inputs = {"x": ONLY_SIZED[form], "y": "float32[num_tokens, num_more]"}
    limits = {"num_more": [2, 9]}
    settings = {"dynamic_shapes": shapes, "symbol_limits": limits}
    made = compiled(model := OnlySized(), inputs=inputs, tracing=settings)
    assert [symbol.label for symbol in made.plan.symbols] == ["num_tokens", "num_more"]
    for size in (5, 8):
        x, y = torch.rand(size if form == "the same" else 3, 8), torch.rand(size, size - 2)
        result, more = made(x, y)
        assert (more, torch.equal(result, model(x, y)[0])) == (size - 2, True)
    if form == "the same":
        with pytest.raises(InputMismatch, match="'y'"):
            made(torch.rand(8, 8), torch.rand(4, 8))
