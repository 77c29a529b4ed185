"""Where weights lie is no difference: another layout is verified, and equal layers are one piece.

Conditions state form and value of a weight, not its place. Layouts are compared with a plain one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from piecegraph.compile.ir.plan import Plan
from piecegraph.compile.verify import trace_difference
from tests.text_compiler import use_text_compiler

from .models import MIX, Stack
from .starts import request_of, start

pytestmark = pytest.mark.compile
LAYERS, PLACES = 4, 16


class Counting(Stack):
    """The first layer counts its calls in its bias."""

    def forward(self, x: Tensor) -> Tensor:
        self.layers[0].up.bias.add_(1)
        return super().forward(x)


def moved(model: nn.Module, place: Callable[[Tensor], Tensor]) -> nn.Module:
    """`model` with equal weights where `place` puts them."""
    for weight in model.requires_grad_(False).parameters():
        weight.data = place(weight.data)
    return model


def in_one_buffer(seed: int, begin: int = 0) -> Callable[[Tensor], Tensor]:
    """Views of one flat buffer, aligned, in any order and with gaps; some stay where they are."""
    numbers, flat = random.Random(seed), torch.empty(128 * PLACES)
    places = iter(numbers.sample(range(PLACES), PLACES))

    def place(values: Tensor) -> Tensor:
        if numbers.random() < 0.2:
            return values
        first = 128 * next(places) + 4 * numbers.randrange(16) + begin
        return flat.as_strided(values.size(), values.stride(), first).copy_(values)

    return place


def difference(model: nn.Module, plan: Plan) -> str | None:
    return trace_difference(request_of(model, splitting_ops=MIX), plan)


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    use_text_compiler(monkeypatch)
    return start(moved(Stack(LAYERS), torch.clone), tmp_path, splitting_ops=MIX).compiled.plan


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(1, 8))]
)
def test_a_layout_is_no_difference(plan, tmp_path, seed):
    model, x = moved(Stack(LAYERS), in_one_buffer(seed)), torch.randn(5, 8)
    warm = start(model, tmp_path, splitting_ops=MIX)
    assert warm.hit
    torch.testing.assert_close(warm(x), model(x))
    assert difference(model, plan) is None
    cold = start(model, tmp_path / "empty", splitting_ops=MIX)
    assert len(cold.compiled.plan.pieces) == len(plan.pieces) < LAYERS


def test_weights_on_top_of_each_other_are_no_difference_unless_one_is_written(plan, tmp_path):
    flat = torch.zeros(64)
    places = torch.clone, lambda values: flat[: values.numel()].view(values.shape)
    for kind, differs in ((Stack, False), (Counting, True)):
        apart, shared = (moved(kind(LAYERS), place) for place in places)
        made = start(apart, tmp_path / kind.__name__, splitting_ops=MIX).compiled.plan
        found = difference(shared, made)
        assert (found is not None) == differs
    assert found.startswith("piece 0 of")  # code for memory apart would be taken for it


def test_another_alignment_is_a_difference(plan):
    found = difference(moved(Stack(LAYERS), in_one_buffer(0, begin=1)), plan)
    assert "a value that its nodes hold differs" in str(found)
