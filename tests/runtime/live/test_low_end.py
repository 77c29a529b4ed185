"""Models with a minimum number of tokens: smaller batches are padded, with or without graphs."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, Events, prepare
from piecegraph.errors import GuardUnproved, InvalidSetting, SizeOutOfRange
from piecegraph.runtime.backends.replay.backend import ReplayBackend

pytestmark = pytest.mark.compile

SEEN = []
LIBRARY = torch.library.Library("low_end_tests", "DEF")
LIBRARY.define("mix(Tensor x, Tensor(a!) out) -> ()")


def mix(x, out):
    SEEN.append(len(x))
    out.copy_(x.cumsum(0))


LIBRARY.impl("mix", mix, "CPU")
torch.library.register_fake("low_end_tests::mix", lambda x, out: None, lib=LIBRARY)


class Recurrent(nn.Module):
    """Branches on a single token, as the state-space layers of Mamba do, and computes the same."""

    def __init__(self, single=None):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.single = single or (lambda linear, x: linear(x[0])[None])
        self.register_buffer("steps", torch.zeros(1))
        self.requires_grad_(False)

    def forward(self, x):
        out = torch.empty_like(x)
        if x.shape[0] == 1:
            x = self.single(self.linear, x)
        else:
            x = self.linear(x)
        torch.ops.low_end_tests.mix(x, out)
        return x + out


def prepared(model, **settings):
    given = {
        "inputs": {"x": "float32[num_tokens, 4]"},
        "splitting_ops": ("low_end_tests::mix",),
        "max_num_tokens": 16,
        "max_num_reqs": 4,
        "compiler": "eager",
        "graph_mode": "NONE",
        "cache": False,
    }
    events = Events()
    return prepare(model, Config(**{**given, **settings}), backend=ReplayBackend(), events=events)


@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE"])
def test_smaller_batches_are_padded_to_the_size_from_which_the_guard_holds(mode):
    model = Recurrent()
    served = prepared(model, graph_mode=mode)
    served.capture()
    for size in (1, 2, 3, 7, 16, 1):
        x = torch.randn(size, 4)
        decisions = []
        SEEN.clear()
        result = served(x, batch=Batch(size, 1), metadata=decisions.append)
        assert decisions[0].descriptor.num_tokens >= 2
        assert [decisions[0].descriptor.num_tokens] == SEEN
        assert result.shape == (size, 4)
        torch.testing.assert_close(result, model(x))
    with pytest.raises(SizeOutOfRange, match="1, 16"):
        served(torch.randn(17, 4), batch=Batch(17, 1))


def test_report_and_events_say_from_where_the_code_is_right():
    served = prepared(Recurrent())
    assert served.report()["pieces"]["ranges"] == [[2, 16]]
    (event,) = served.events.named("low_end")
    assert event.facts["min_num_tokens"] == 2
    assert "test_low_end.py" in event.facts["where"]


def test_model_that_computes_something_else_for_small_batches_is_refused():
    model = Recurrent(lambda linear, x: x * 2)
    with pytest.raises(GuardUnproved, match=r"tracing\.min_num_tokens=2") as caught:
        prepared(model)
    assert "symbol_limits" not in str(caught.value)
    assert "narrow" not in str(caught.value)


@pytest.mark.parametrize(
    "part",
    [lambda x: x.split(4)[0], lambda x: x if len(x) > 3 else torch.cat([x, x, x, x])[:4]],
    ids=["fewer rows", "more rows"],
)
def test_model_whose_padded_result_has_other_rows_is_refused(part):
    """What is cut from the result of a padded batch is what the trace states, whatever the model
    returns for the small one."""

    class Rows(Recurrent):
        def forward(self, x):
            return part(super().forward(x))

    with pytest.raises(GuardUnproved, match=r"tracing\.min_num_tokens="):
        prepared(Rows())


def test_user_states_the_low_end():
    model = Recurrent(lambda linear, x: x * 2)
    served = prepared(model, tracing={"min_num_tokens": 4})
    x = torch.randn(1, 4)
    padded = torch.cat([x, torch.zeros(3, 4)])
    torch.testing.assert_close(served(x, batch=Batch(1, 1)), model(padded)[:1])
    assert served.dispatch(Batch(1, 1)).descriptor.num_tokens == 4
    with pytest.raises(InvalidSetting, match=r"tracing\.min_num_tokens = 5: it is outside"):
        Config(tracing={"min_num_tokens": 5}, max_num_tokens=4)


def test_check_run_leaves_the_model_as_it_was():
    class Counting(Recurrent):
        def forward(self, x):
            self.steps.add_(1)
            self.calls += 1
            self.sizes.append(x.shape[0])
            return super().forward(x)

    model = Counting()
    model.calls, model.sizes = 0, []
    prepared(model)
    assert (model.steps.item(), model.calls, model.sizes) == (0, 0, [])


def test_written_inputs_of_a_padded_step_reach_the_caller():
    class Writing(Recurrent):
        def forward(self, x):
            result = super().forward(x)
            x.add_(1)
            return result

    served = prepared(Writing())
    x = torch.zeros(1, 4)
    served(x, batch=Batch(1, 1))
    assert torch.equal(x, torch.ones(1, 4))


def test_a_result_of_a_padded_step_that_is_an_input_is_the_callers():
    class Passing(Recurrent):
        def forward(self, x):
            return super().forward(x), x[:, :2]

    served, x = prepared(Passing()), torch.randn(1, 4)
    _, passed = served(x, batch=Batch(1, 1))
    served(torch.randn(1, 4), batch=Batch(1, 1))
    assert torch.equal(passed, x[:, :2])


def test_guard_that_fails_for_large_sizes_is_no_low_end():
    class Limited(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] < 10 else x + 2

    with pytest.raises(GuardUnproved) as caught:
        prepared(Limited(), splitting_ops=(), tracing={"min_num_tokens": 1})
    assert "min_num_tokens=" in str(caught.value) or "max_num_tokens=" in str(caught.value)
