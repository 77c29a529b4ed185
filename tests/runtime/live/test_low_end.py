"""Models that choose by a small number of tokens, and a minimum that the user states."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config
from piecegraph.errors import CompileError, GuardUnproved, InvalidSetting, SizeOutOfRange
from piecegraph.runtime.backends.replay.backend import ReplayBackend

from ..conftest import Computes, captured, right_step

pytestmark = [pytest.mark.compile, pytest.mark.usefixtures("mix_op")]


class Recurrent(nn.Module):
    """Branches on a single token, as the state-space layers of Mamba do, and computes the same."""

    def __init__(self, single=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.single = single or SINGLE["the same"]
        self.register_buffer("steps", torch.zeros(1))
        self.requires_grad_(False)

    def forward(self, x):
        out = torch.empty_like(x)
        if x.shape[0] == 1:
            x = self.single(self.linear, x)
        else:
            x = self.linear(x)
        torch.ops.live_tests.mix(x, out)
        return x + out


def prepared(model, **settings):
    given = {"splitting_ops": ("live_tests::mix",), "graph_mode": "NONE", **settings}
    return captured(model, 16, ReplayBackend(), **given)


SINGLE = {
    "the same": lambda linear, x: linear(x[0])[None],
    "something else": lambda linear, x: x * 2,
}


@pytest.mark.parametrize("single", SINGLE)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_sizes_for_which_a_guard_does_not_hold_have_a_trace_of_their_own(mode, single):
    model = Recurrent(SINGLE[single])
    served = prepared(model, graph_mode=mode, capture_sizes=(1, 2, 4))
    for size in (1, 2, 3, 7, 16, 1):
        right_step(served, model, torch.randn(size, 4))
    with pytest.raises(SizeOutOfRange, match="1, 16"):
        served(torch.randn(17, 4), batch=Batch(17, 1))


def test_report_and_events_say_which_sizes_have_a_trace():
    served = prepared(Recurrent())
    assert served.report()["pieces"]["ranges"] == [[1, 1], [2, 16]]
    (event,) = served.events.named("trace.intervals")
    assert event.facts["intervals"] == [(1, 1), (2, 16)]
    assert "test_low_end.py" in event.facts["where"]


def test_what_smaller_batches_run_is_whatever_the_model_runs():
    """Also between two sizes at which it runs the same, and what it writes."""

    class Tiles(Recurrent):
        def forward(self, x):
            self.steps.add_(x.shape[0])
            y = super().forward(x)
            return y * 2 if 5 <= x.shape[0] < 10 else y

    model, plain = Tiles(), Tiles()
    served = prepared(model)
    for size in (1, 4, 7, 11, 16):
        right_step(served, plain, torch.randn(size, 4))
    assert torch.equal(model.steps, plain.steps)


@pytest.mark.parametrize(
    "part",
    [lambda x: x.split(4)[0], lambda x: x if len(x) > 3 else torch.cat([x, x, x, x])[:4]],
    ids=["fewer rows", "more rows"],
)
def test_model_whose_result_has_another_form_for_small_batches_is_refused(part):
    class Rows(Recurrent):
        def forward(self, x):
            return part(super().forward(x))

    with pytest.raises(CompileError, match="other results"):
        prepared(Rows())


def test_user_states_the_low_end():
    model = Recurrent(lambda linear, x: x * 2)
    served = prepared(model, tracing={"min_num_tokens": 4})
    right_step(served, lambda x: model(torch.cat([x, torch.zeros(3, 4)]))[:1], torch.randn(1, 4))
    assert served.dispatch(Batch(1, 1)).descriptor.num_tokens == 4
    with pytest.raises(InvalidSetting, match=r"tracing\.min_num_tokens = 5: it is outside"):
        Config(tracing={"min_num_tokens": 5}, max_num_tokens=4)


def test_written_inputs_of_a_padded_step_reach_the_caller():
    class Writing(Recurrent):
        def forward(self, x):
            result = super().forward(x)
            x.add_(1)
            return result

    served = prepared(Writing(), tracing={"min_num_tokens": 2})
    x = torch.zeros(1, 4)
    served(x, batch=Batch(1, 1))
    assert torch.equal(x, torch.ones(1, 4))


def test_a_result_of_a_padded_step_that_is_an_input_is_the_callers():
    class Passing(Recurrent):
        def forward(self, x):
            return super().forward(x), x[:, :2]

    served = prepared(Passing(), tracing={"min_num_tokens": 2})
    x = torch.randn(1, 4)
    _, passed = served(x, batch=Batch(1, 1))
    served(torch.randn(1, 4), batch=Batch(1, 1))
    assert torch.equal(passed, x[:, :2])


def test_one_size_in_the_middle_has_a_graph_of_its_own():
    model = Computes(lambda x: x * (3 if x.shape[0] == 7 else 2))
    served = captured(model, 16, capture_sizes=(4, 7, 8), tracing={"guards": "split"})
    for size in (3, 6, 7, 8):
        right_step(served, model, torch.randn(size, 4))


def test_guard_that_holds_from_no_size_on_is_refused():
    with pytest.raises(GuardUnproved, match="num_tokens"):
        captured(Computes(lambda x: x + 1 if x.shape[0] % 2 else x + 2))
