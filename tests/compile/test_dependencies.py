"""Dependencies between steps, and plans that could not run."""

import pytest

from piecegraph.compile.ir.serialization import Ref
from piecegraph.compile.plan.dependencies import dependencies, drawing
from piecegraph.errors import IllegalOrder

from .plans import call, piece, small_plan

STEPS = [
    piece("i0", outs=("t0", "t1")),
    piece("i0", outs=("t2",)),
    call("mix.default", Ref("t0"), Ref("t1"), "layer"),
    piece("t1", "t2", outs=("t3",)),
]


def test_edges_are_values_read_and_values_written():
    graph = dependencies(small_plan(STEPS))
    edges = {(earlier, later): values for earlier, later, values in graph.edges(data="values")}
    assert edges == {(0, 2): ["t0", "t1"], (1, 3): ["t2"], (2, 3): ["t1"]}


def test_write_after_a_read_keeps_its_place():
    steps = [
        piece("i0", outs=("t0",)),
        piece("t0", outs=("t1",)),
        call("bump.default", Ref("t0"), Ref("i0")),
        piece("t0", outs=("t2",)),
    ]
    edges = dependencies(small_plan(steps)).edges
    assert (1, 2) in edges, "the reader must run before the value is changed"
    assert (2, 3) in edges, "and the reader of the new value after"


@pytest.mark.parametrize(
    ("steps", "value"),
    [
        ([piece("t0", outs=("t1",))], "t0"),
        ([piece("i0", outs=("t0",)), piece("i0", outs=("t0",))], "t0"),
        ([STEPS[2]], "t0"),
        ([piece("t1", outs=("t2",)), piece("i0", outs=("t1",))], "t1"),
    ],
)
def test_order_that_cannot_run_is_refused(steps, value):
    with pytest.raises(IllegalOrder, match=value):
        dependencies(small_plan(steps))


def test_drawing_is_data_with_depths():
    drawn = drawing(dependencies(small_plan(STEPS)))
    assert [(step["label"], step["depth"]) for step in drawn["steps"]] == [
        ("piece 0", 0),
        ("piece 0", 0),
        ("piecegraph_test::mix.default", 1),
        ("piece 0", 2),
    ]
    assert (1, 3, ["t2"]) in drawn["edges"]
