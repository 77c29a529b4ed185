"""A guard that is checked: each step, each captured size, and what a step does where it fails."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, RuntimeMode, prepare
from piecegraph.errors import GuardBroken

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
