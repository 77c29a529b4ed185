"""What Python inside graphs and breaks leave for each other on a model that is not traced."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import Batch, ForwardContext, break_graph, get_forward_context, prepare
from piecegraph.errors import AllCapturesFailed, NotReplayed
from piecegraph.runtime.forward_context import CURRENT

from ..conftest import small_config


class Plain:
    number = 0.0


class Model(nn.Module):
    """A break between two graphs; what each does is given."""

    def __init__(self, before, inside, after):
        super().__init__()
        self.number, self.calls, self.before, self.after = 0.0, 0.0, before, after
        self.held, self.space, self.items = Plain(), SimpleNamespace(number=0.0), {"n": 0.0}
        self.listed, self.inner = list[float](), nn.Identity()
        self.inside = inside
        self.works = [torch.full((1,), 2.0), torch.full((1,), 3.0)]
        self.work = self.works[0]

    @break_graph(fake=lambda self, x: torch.empty_like(x))
    def attend(self, x):
        return self.inside(self, x)

    def forward(self, x):
        x = x * 1.0
        self.before(self, x)
        return self.after(self, self.attend(x)) + 1.0


def nothing(m, x):
    return x


def to(path):
    """A function that writes the number of rows to an attribute."""
    *holders, name = path.split(".")

    def write(m, x):
        for holder in holders:
            m = getattr(m, holder)
        setattr(m, name, float(len(x)))

    return write


def of(path):
    """A function that adds an attribute."""
    *holders, name = path.split(".")

    def read(m, x):
        for holder in holders:
            m = getattr(m, holder)
        return x + getattr(m, name)

    return read


def leave(path):
    """A function that writes what the step's metadata has."""
    write = to(path)
    return lambda m, x: (write(m, [0] * get_forward_context().metadata.k), x * 1.0)[1]


def put(m, x):
    m.items["n"] = get_forward_context().metadata.k
    return x * 1.0


def choose(m, x):
    m.work = m.works[get_forward_context().metadata.k % 2]
    return x * 1.0


def replace(m, x):
    m.held = Plain()
    m.held.number = float(len(x))


def count(m, x):
    m.calls += 1.0
    return x


def append(m, x):
    m.listed.append(float(len(x)))


def behind(m, x):
    m.number = float(len(x))
    return x


SET_AGAIN: dict[str, Any] = {
    "a number": (to("number"), of("number"), nothing),
    "of a module": (to("inner.number"), of("inner.number"), nothing),
    "of an object": (to("held.number"), of("held.number"), nothing),
    "another object": (replace, of("held.number"), nothing),
    "a tensor": (lambda m, x: setattr(m, "number", x * 2.0), of("number"), nothing),
    "of the step before": (nothing, of("number"), behind),
    "two in turn": (to("number"), of("number"), lambda m, x: setattr(m, "number", 7.0) or x),
}


def prepared_for(functions, graph_mode="PIECEWISE"):
    config = small_config(4, compile=False, capture_sizes=(2, 4), graph_mode=graph_mode)
    prepared = prepare(Model(*functions), config)
    prepared.capture(lambda descriptor, mode: SimpleNamespace(k=2))
    return prepared


def steps(prepared, ks=(2,)):
    """Steps of several sizes, compared with those of the model alone."""
    alone = copy.deepcopy(prepared.compiled.model)
    for size, k in itertools.product((2, 4, 3, 4, 2), ks):
        x, metadata = torch.ones(size, 4), SimpleNamespace(k=k)
        rows = prepared(x, batch=Batch(size, size), metadata=metadata)
        token = CURRENT.set(ForwardContext({}, metadata))
        assert torch.equal(rows, alone(x))
        CURRENT.reset(token)


@pytest.mark.parametrize("case", SET_AGAIN)
def test_what_a_graph_sets_is_set_in_each_step(case):
    prepared = prepared_for(SET_AGAIN[case])
    assert len(prepared.recordings()) == 2
    steps(prepared)


@pytest.mark.parametrize("case", [(count, of("calls"), nothing), (nothing, of("calls"), count), (
    append, lambda m, x: x + m.listed[-1], nothing)])  # fmt: skip
def test_what_a_graph_changes_by_what_it_was_and_a_break_reads_is_refused(case):
    with pytest.raises(AllCapturesFailed, match=r"model\.(calls|listed), .* what it was") as caught:
        prepared_for(case)
    assert __file__ in str(caught.value)


def test_what_a_graph_changes_and_no_break_reads_may_change():
    """As in a trace: a warning tells once that no step does it."""
    prepared = prepared_for((count, nothing, lambda m, x: (append(m, x), x)[1]))
    steps(prepared)
    dropped = prepared.events.named("effect_dropped")
    assert [each.facts["changed"] for each in dropped] == ["model.calls", "model.listed"]
    assert {each.facts["where"].rpartition(":")[0] for each in dropped} == {__file__}


@pytest.mark.parametrize("graph_mode", ["PIECEWISE", "FULL"])
def test_a_tensor_that_a_graph_keeps_for_the_next_step_is_refused(graph_mode):
    """As in a trace. One that is set to what it was is none."""

    def add(m, x):
        m.work = m.work + 1

    def same(m, x):
        m.work = m.work.requires_grad_(False)

    prepared_for((same, nothing, nothing), graph_mode=graph_mode)
    with pytest.raises(AllCapturesFailed, match=r"StateChanged: .* model\.work for its next"):
        prepared_for((add, nothing, nothing), graph_mode=graph_mode)


COMPARED: dict[str, Any] = {
    "a number": (nothing, leave("number"), of("number")),
    "of the step before": (lambda m, x: m.number, leave("number"), of("number")),
    "of an object": (nothing, leave("held.number"), of("held.number")),
    "of a namespace": (nothing, leave("space.number"), of("space.number")),
    "in a dict": (nothing, put, lambda m, x: x + m.items["n"]),
    "which tensor": (nothing, choose, of("work")),
}


@pytest.mark.parametrize("case", COMPARED)
def test_what_a_break_leaves_and_a_graph_has_read_is_compared(case):
    prepared = prepared_for(COMPARED[case])
    steps(prepared)
    with pytest.raises(NotReplayed, match=r"model\..* at the capture, and is .* now"):
        steps(prepared, ks=(3,))


def test_a_capture_leaves_the_classes_of_modules_as_they_were():
    prepared_for(SET_AGAIN["of an object"])
    for kind in (Model, nn.Identity, Plain):
        assert "__getattribute__" not in vars(kind)
