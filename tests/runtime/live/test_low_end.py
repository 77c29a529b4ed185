"""Models that choose by a small number of tokens, and a minimum that the user states."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, Events, prepare
from piecegraph.errors import CompileError, GuardUnproved, InvalidSetting, SizeOutOfRange
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
        self.single = single or SINGLE["the same"]
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


SINGLE = {
    "the same": lambda linear, x: linear(x[0])[None],
    "something else": lambda linear, x: x * 2,
}


@pytest.mark.parametrize("single", SINGLE)
@pytest.mark.parametrize("mode", ["NONE", "PIECEWISE", "FULL"])
def test_sizes_for_which_a_guard_does_not_hold_have_a_trace_of_their_own(mode, single):
    model, settings = Recurrent(SINGLE[single]), {"capture_sizes": (1, 2, 4)}
    if mode == "FULL":
        settings["attention"] = {"support": "ALWAYS"}
    served = prepared(model, graph_mode=mode, **settings)
    served.capture()
    for size in (1, 2, 3, 7, 16, 1):
        x = torch.randn(size, 4)
        result = served(x, batch=Batch(size, 1), metadata=SEEN.append)
        torch.testing.assert_close(result, model(x))
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
        x = torch.randn(size, 4)
        torch.testing.assert_close(served(x, batch=Batch(size, 1)), plain(x))
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
    x = torch.randn(1, 4)
    padded = torch.cat([x, torch.zeros(3, 4)])
    torch.testing.assert_close(served(x, batch=Batch(1, 1)), model(padded)[:1])
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
    class Seven(nn.Module):
        def forward(self, x):
            return x * (3 if x.shape[0] == 7 else 2)

    served = prepared(
        Seven(), splitting_ops=(), graph_mode="FULL", capture_sizes=(4, 7, 8),
        attention={"support": "ALWAYS"}, tracing={"guards": "split"},
    )  # fmt: skip
    served.capture()
    for size in (3, 6, 7, 8):
        x = torch.randn(size, 4)
        torch.testing.assert_close(served(x, batch=Batch(size, 1)), Seven()(x))


def test_guard_that_holds_from_no_size_on_is_refused():
    class Odd(nn.Module):
        def forward(self, x):
            return x + 1 if x.shape[0] % 2 else x + 2

    with pytest.raises(GuardUnproved, match="num_tokens"):
        prepared(Odd(), splitting_ops=())
