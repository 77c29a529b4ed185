"""A guard that is checked: each step, each captured size, and what a step does where it fails."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, RuntimeMode, prepare
from piecegraph.errors import GuardBroken, GuardUnproved

from .models import X

pytestmark = pytest.mark.compile


class Eights(nn.Module):
    """Takes another way for multiples of 8."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.ops.piecegraph_test.fresh(x + 1, "a")
        return x * 3 if x.shape[0] % 8 == 0 else self.linear(x)


@pytest.fixture
def prepared():
    made = []

    def prepare_(**settings):
        config = Config(
            inputs=X,
            splitting_ops=("piecegraph_test::*",),
            compiler="eager",
            cache=False,
            max_num_tokens=16,
            max_num_reqs=16,
            capture_sizes=(4, 8, 12),
            **{"tracing": {"guards": "check"}, **settings},
        )
        made.append(prepare(Eights(), config))
        made[-1].capture()
        return made[-1]

    yield prepare_
    for each in made:
        each.close()


def batch(size):
    return Batch(num_tokens=size, num_reqs=1)


def test_size_that_breaks_a_guard_is_not_captured(prepared):
    model = prepared()
    captured = {
        model.dispatcher.plan.entries[i].descriptor.num_tokens for i, _ in model.recordings()
    }
    assert captured == {4, 12}
    x = torch.randn(6, 8)
    decision = model.dispatch(batch(6))
    assert decision.mode is not RuntimeMode.NONE
    assert decision.descriptor.num_tokens == 12
    with torch.no_grad():
        torch.testing.assert_close(model.run(decision, x), Eights()(x))


def test_step_with_a_broken_guard_is_an_error(prepared):
    model = prepared()
    for size in (8, 16):
        with pytest.raises(GuardBroken, match="8"):
            model(torch.randn(size, 8), batch=batch(size))


class Asks(nn.Module):
    """Of its last argument it reads one size, to choose."""

    def forward(self, x, mask):
        return x * (2 if mask.shape[1] > 4 else 3)


def test_a_size_that_only_a_guard_reads_is_known_by_its_name():
    config = Config(
        inputs={**X, "mask": "bool[num_tokens, num_patches]"},
        compiler="eager",
        cache=False,
        max_num_tokens=16,
        max_num_reqs=16,
        graph_mode="NONE",
        tracing={"symbol_limits": {"num_patches": (1, 6)}},
    )
    with pytest.raises(
        GuardUnproved, match=r"num_patches > 4, .* num_patches = 1, 2, 3 \(4 in all"
    ):
        prepare(Asks(), config)
    model, x = prepare(Asks(), config.changed(tracing={"guards": "check"})), torch.randn(3, 8)
    assert torch.equal(model(x, torch.ones(3, 6) > 0, batch=batch(3)), x * 2)
    with pytest.raises(GuardBroken, match="num_patches > 4"):
        model(x, torch.ones(3, 4) > 0, batch=batch(3))
    prepare(Asks(), config.changed(tracing={"symbol_limits": {"num_patches": (5, 6)}})).close()
    model.close()
