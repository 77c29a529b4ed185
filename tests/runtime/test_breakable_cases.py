"""Programs with breaks, restated from what users of breakable CUDA graphs do.

Each is run as it is, recorded with breaks and recorded as one graph; replays on changed inputs
give what the program gives. The page is docs/reference.md, "Coming from breakable CUDA graphs".
"""

import gc
import weakref
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from piecegraph import break_graph
from piecegraph.errors import PiecegraphError
from tests.processes import in_a_thread

Step = Callable[[Tensor], Any]
Pair = namedtuple("Pair", "low high")


@break_graph
def running(x):
    return x.cumsum(0)


@break_graph
def into(x, out, *, scale=1.0):
    out.copy_(x * scale)


@break_graph
def in_place(x):
    return x.mul_(2)


@break_graph
def product(x):
    return x @ x.T


@break_graph
def product_into(x, out):
    out.copy_(x @ x.T)


@break_graph
def both(x):
    return Pair(x.clamp(max=0), x.clamp(min=0))


@break_graph
def by_name(parts, *, names):
    return {name: parts[name] + 1 for name in names}


@break_graph
def first_row(x):
    return x[:1]


@break_graph
def nothing(x):
    pass


@break_graph
def outer(x):
    return running(x) + 1


class Layer(nn.Module):
    """Breaks in a method, a static method and a class method."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4), requires_grad=False)

    @break_graph
    def mix(self, x):
        return x.cumsum(0) * self.weight

    @staticmethod
    @break_graph
    def shift(x):
        return x.roll(1, 0)

    @classmethod
    def twice(cls, x):
        return cls.shift(cls.shift(x) + 1)

    def forward(self, x):
        return self.mix(x + 1) + self.shift(x)


class Callee:
    """A callable object as a splitting function."""

    def __call__(self, x):
        return x.flip(0)


LAYER = Layer()
CALLEE = break_graph(Callee())
SCALED = break_graph(partial(torch.mul, other=3.0))


def in_a_loop(x):
    for _ in range(5):
        x = running(x + 1) / 2
    return x


def in_a_helper(x):
    def helper(y):
        return running(y * 3) - y

    return helper(x) + helper(x + 1)


def written_argument(x):
    y = x + 1
    out = torch.empty_like(y)
    into(y, out, scale=3.0)
    return out - y


def written_slice(x):
    out = torch.zeros_like(x)
    into(x[:1] + 1, out[1:2])
    return out * 2


def in_place_on_what_a_graph_made(x):
    y = x + 1
    z = in_place(y)
    return y + z


def result_used_twice(x):
    y = running(x * 2)
    return running(y + 1) * y


def result_used_much_later(x):
    early = running(x)
    for _ in range(3):
        x = running(x * 2)
    return x + early


def view_of_a_result(x):
    y = running(x).view(-1)
    return y[: x.numel()].view_as(x) + 1


def named_tuple(x):
    parts = both(x - 0.5)
    return parts.low * 2 + parts.high


def keywords_and_dicts(x):
    parts = by_name({"a": x, "b": x * 2}, names=("a", "b"))
    return parts["a"] + parts["b"]


def no_result(x):
    y = x * 2
    nothing(y)
    return y + 1


def outputs_of_both_kinds(x):
    y = x * 2
    return {"eager": running(y), "graph": [y, (y + 1, 7)], "input": x}


def without_gradients(x):
    with torch.no_grad():
        y = running(x * 2)
    return y + 1


def under_autocast(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return running(x @ x.T) @ x


def break_under_autocast(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return product(x) * 2


def written_under_autocast(x):
    out = x.new_empty(x.shape[0], x.shape[0])
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        product_into(x, out)
    return out + 1


PROGRAMS: dict[str, Step] = {
    "at_the_start": lambda x: running(x) * 2,
    "at_the_end": lambda x: running(x * 2),
    "in_the_middle": lambda x: running(x * 2) + 1,
    "consecutive": lambda x: running(running(running(x + 1))) * 2,
    "decided_by_a_shape": lambda x: running(x) if x.shape[0] > 1 else x * 2,
    "nested": lambda x: outer(x * 2) + 1,
    "result_that_is_a_view": lambda x: first_row(x + 1) * 2 + x,
    "a_bound_method": lambda x: LAYER.mix(x * 2) + 1,
    "a_static_and_a_class_method": lambda x: Layer.shift(x * 2) + Layer.twice(x),
    "a_module": LAYER.forward,
    "an_object_and_a_partial": lambda x: CALLEE(x + 1) + SCALED(x),
} | {
    program.__name__: program
    for program in (
        *(in_a_loop, in_a_helper, written_argument, written_slice, in_place_on_what_a_graph_made),
        *(result_used_twice, result_used_much_later, view_of_a_result, named_tuple),
        *(keywords_and_dicts, no_result, outputs_of_both_kinds, without_gradients, under_autocast),
        *(break_under_autocast, written_under_autocast),
    )
}


@pytest.mark.parametrize("breaks", [True, False])
@pytest.mark.parametrize("program", PROGRAMS)
def test_replay_equals_the_program(rig, program, breaks):
    LAYER.to(rig.device)
    step, x = PROGRAMS[program], rig.rand(3, 4)
    recording = rig.record(step, x, breaks=breaks)
    for _ in range(3):
        x.copy_(rig.rand(3, 4))
        recording.replay()
        assert_close(recording.outputs, step(x))


def test_error_in_a_break_reaches_the_caller_and_the_next_replay_is_right(rig):
    failing = [False]

    @break_graph
    def sometimes(x):
        if failing[0]:
            raise ZeroDivisionError("of the user")
        return x.cumsum(0)

    def step(x):
        return sometimes(x * 2) + 1

    x = rig.rand(3, 4)
    recording = rig.record(step, x)
    failing[0] = True
    with pytest.raises(ZeroDivisionError, match="of the user"):
        recording.replay()
    failing[0] = False
    recording.replay()
    assert_close(recording.outputs, step(x))


def test_break_is_a_plain_call_in_another_thread(rig):
    """A recording of one thread does not see the calls of another."""
    results = []
    y = rig.rand(3, 4)

    @break_graph
    def with_a_thread(x):
        return x + 1

    def step(x):
        if rig.backend.runs_python:  # a capture of a device sees work of another thread
            results.append(in_a_thread(lambda: running(y)))
        return with_a_thread(x)

    recording = rig.record(step, rig.rand(3, 4))
    assert len(recording.segments) in (1, 2)
    for result in results:
        assert_close(result, y.cumsum(0))


def test_recording_that_is_dropped_is_collected(rig):
    """The program and what it holds are not kept by what was recorded of it."""
    layers = [Layer().to(rig.device)]
    recording = rig.record(lambda x: layers[0].mix(x) + 1, rig.rand(3, 4))
    recording.replay()
    weight = weakref.ref(layers.pop())
    del recording
    gc.collect()
    assert weight() is None


def test_program_whose_breaks_differ_from_run_to_run_is_refused(rig):
    runs = []

    def step(x):
        runs.append(1)
        return running(x) if len(runs) % 2 else x * 2

    with pytest.raises(PiecegraphError):
        rig.record(step, rig.rand(3, 4))


ON_A_DEVICE = pytest.mark.parametrize(
    "rig", [pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


@ON_A_DEVICE
def test_streams_that_are_joined_are_part_of_the_graphs(rig):
    side = torch.cuda.Stream(rig.device)

    def step(x):
        current = torch.cuda.current_stream(rig.device)
        side.wait_stream(current)
        with torch.cuda.stream(side):
            y = x * 2
        current.wait_stream(side)
        return running(y) + 1

    x = rig.rand(3, 4)
    recording = rig.record(step, x)
    x.copy_(rig.rand(3, 4))
    recording.replay()
    assert_close(recording.outputs, step(x))


@ON_A_DEVICE
def test_a_stream_that_is_not_joined_fails_the_capture(rig):
    side = torch.cuda.Stream(rig.device)

    def step(x):
        side.wait_stream(torch.cuda.current_stream(rig.device))
        with torch.cuda.stream(side):
            x.mul(2)
        return running(x) + 1

    with pytest.raises(PiecegraphError):
        rig.record(step, rig.rand(3, 4))
    assert rig.record(PROGRAMS["in_the_middle"], rig.rand(3, 4)).segments  # the next capture works
