"""A wrong graph of a model without a trace: the operation, with its line and module."""

import inspect
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from piecegraph import break_graph
from piecegraph.tools.bisect import bisect
from tests.ops import define

from . import faulty_models as models
from .planted_faults import site_for

pytestmark = pytest.mark.compile

SCALE = [1.0]
TABLE = torch.ones(4)
ON_HOST = TABLE.numpy()  # the same memory
CAPTURING = [False]


class Frozen(torch.nn.Module):
    def forward(self, x):
        return x.cos() * SCALE[0]  # frozen


class Updated(torch.nn.Module):
    """Its table is written in place, and not by an operator: a replay does not write it."""

    def forward(self, x):
        ON_HOST.fill(SCALE[0])
        return x.cos() * TABLE  # updated


LIBRARY = torch.library.Library("untraced", "DEF")


def two_faced(x):
    if CAPTURING[0]:
        return x.abs()
    return x.neg()  # another operator


define(LIBRARY, "two_faced(Tensor x) -> Tensor", two_faced, torch.empty_like)


class TwoFaced(torch.nn.Module):
    def forward(self, x):
        return torch.ops.untraced.two_faced(x)


def scaled(x):
    return x * SCALE[0]  # in a splitting op


define(LIBRARY, "scaled(Tensor x) -> Tensor", scaled, torch.empty_like)


class Splitting(torch.nn.Module):
    def forward(self, x):
        return torch.ops.untraced.scaled(x + 1) * 2


@break_graph(fake=lambda x: x * 1)
def by_scale(x):
    return x + SCALE[0]  # in a break


class InBreak(torch.nn.Module):
    def forward(self, x):
        return by_scale(x)


class AfterRegion(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.region = torch.compile(lambda x: x.sin() + 1, backend="eager")

    def forward(self, x):
        return self.region(x) * SCALE[0]  # after a region


class Outer(models.Tiny):
    """Attention is between `before` and `inner`."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(super().forward(x))


def line_of(comment):
    lines = inspect.getsource(sys.modules[__name__]).splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.endswith(f"# {comment}")]
    return f"({Path(__file__).name}:{number})"


def changing(number, metadata):
    """Metadata of a step; as it is made, what Python keeps becomes that of the step."""

    def at_step(decision):
        SCALE[0], CAPTURING[0] = number + 1.0, False
        return metadata(decision)

    return at_step


@pytest.fixture
def case():
    """`case(model, mode)` has three steps, each with another scale."""

    def make(model, graph_mode="PIECEWISE", sizes=(4, 3, 4), **settings):
        it = site.case(model, sizes, compile=False, graph_mode=graph_mode, **settings)

        def capture_metadata(descriptor, mode):
            CAPTURING[0] = True
            return it.capture_metadata(descriptor, mode)

        steps = [replace(s, metadata=changing(n, s.metadata)) for n, s in enumerate(it.steps)]
        return replace(it, steps=steps, capture_metadata=capture_metadata)

    with site_for("eager") as site:
        yield make


@pytest.mark.parametrize(
    ("inner", "op", "comment", "says"),
    [
        (Frozen, "aten::mul", "frozen", "it takes [2.0] in the model and [1.0] in the graph"),
        (Updated, "aten::mul", "updated", "its result differs, and none before it"),
        (TwoFaced, "aten::neg", "another operator",
         "the model calls aten::neg where the graph has aten::abs"),
        (AfterRegion, "aten::mul", "after a region", "it takes [2.0] in the model and [1.0]"),
    ],
)  # fmt: skip
def test_the_operation_is_named_with_its_line_and_module(case, inner, op, comment, says):
    finding = bisect(case(Outer(inner())))
    assert (finding.stage, finding.operator) == ("PIECEWISE", f"{op} {line_of(comment)}")
    assert finding.note.startswith(f"in module inner; {says}")


def test_an_operation_that_is_wrong_inside_a_full_graph_only(case):
    finding = bisect(case(Outer(InBreak()), "FULL"))
    assert (finding.stage, finding.operator) == ("FULL", f"aten::add {line_of('in a break')}")
    assert finding.note.startswith("inside the FULL graph; right with splitting ops between")


def test_the_same_of_a_model_that_is_traced(case):
    it = case(Splitting(), "FULL", splitting_ops=("untraced::scaled",))
    finding = bisect(replace(it, config=it.config.changed(compile=True)))
    assert (finding.stage, finding.piece) == ("FULL", None)
    assert finding.operator == f"aten::mul {line_of('in a splitting op')}"
    assert "it takes [2.0] in the model and [1.0] in the graph" in finding.note


def test_padding_blames_no_operation(case):
    finding = bisect(case(models.Tiny(), sizes=(4, 3), dump=None))
    assert (finding.stage, finding.operator, finding.step) == ("PIECEWISE", None, 1)
    assert "something of an earlier step is left there" in finding.note


def test_a_full_graph_needs_no_break(case):
    said = []
    assert bisect(case(Frozen(), "FULL", (4,), splitting_ops=()), say=said.append) is None
    assert said == ["FULL: right"]
