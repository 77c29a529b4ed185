"""The graph of steps: what follows what, and plans that could not run."""

from __future__ import annotations

import networkx as nx
import pytest

from piecegraph.compile.ir.serialization import Ref
from piecegraph.compile.lower.dependencies import picture, piece_graph
from piecegraph.errors import IllegalOrder

from .plans import call, piece, small_plan

STEPS = [
    piece("i0", outs=("t0", "t1")),
    piece("i0", outs=("t2",)),
    call("mix.default", Ref("t0"), Ref("t1"), "layer"),
    piece("t1", "t2", outs=("t3",)),
]


def test_edges_are_values_read_and_values_written():
    graph = piece_graph(small_plan(STEPS))
    assert {edge: data["values"] for edge, data in graph.edges.items()} == {
        (0, 2): ["t0", "t1"],
        (1, 3): ["t2"],
        (2, 3): ["t1"],
    }
    assert nx.is_directed_acyclic_graph(graph)


def test_write_after_a_read_keeps_its_place():
    steps = [
        piece("i0", outs=("t0",)),
        piece("t0", outs=("t1",)),
        call("bump.default", Ref("t0"), Ref("i0")),
        piece("t0", outs=("t2",)),
    ]
    graph = piece_graph(small_plan(steps))
    assert graph.has_edge(1, 2), "the reader must run before the value is changed"
    assert graph.has_edge(2, 3), "and who wants the change after"


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
        piece_graph(small_plan(steps))


def test_picture_is_data_with_depths():
    drawn = picture(piece_graph(small_plan(STEPS)))
    assert [(step["label"], step["depth"]) for step in drawn["steps"]] == [
        ("piece 0", 0),
        ("piece 0", 0),
        ("piecegraph_test::mix.default", 1),
        ("piece 0", 2),
    ]
    assert [1, 3, ["t2"]] in drawn["edges"]
