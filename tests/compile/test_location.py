"""The user's line of a fault, and the first line of its message."""

import os
import textwrap

import pytest
import torch
from torch.fx import Graph, GraphModule

from piecegraph.compile.guards.range_check import difference_at
from piecegraph.compile.ir.locations import error_line, first_line, node_location

TORCH = os.path.dirname(torch.__file__)


def test_packages_whose_name_begins_with_torch_are_not_torch():
    node = Graph().placeholder("x")
    frames = [("/model.py", 3), (f"{TORCH}vision/ops.py", 5), (f"{TORCH}/nn/functional.py", 7)]
    node.meta["stack_trace"] = "\n".join(f'File "{file}", line {line}' for file, line in frames)
    assert node_location(node) == f"{TORCH}vision/ops.py:5"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("\n  one \n"), "one"),
        (AssertionError(), "AssertionError"),
        (KeyError(""), "''"),
        (
            RuntimeError(
                "C++ compile error\n\nCommand:\ng++ x\n\nOutput:\nIn file a:1\nb.h:2: error: no\n"
            ),
            "C++ compile error: b.h:2: error: no",
        ),
        (RuntimeError("C++ compile error\n\nOutput:\nnothing of use"), "C++ compile error"),
    ],
)
def test_first_line_of_an_error(error, said):
    assert first_line(error) == said


def test_a_line_of_python_itself_is_no_place_of_an_error():
    """Between a model and torch are its decorators and context managers."""
    for fail, place in ((lambda: textwrap.dedent(1), __file__), (None, None)):
        try:
            fail() if fail else textwrap.TextWrapper(width=0).wrap("one")
        except (TypeError, ValueError) as error:
            raised = error if fail else error.with_traceback(error.__traceback__.tb_next)
        line = error_line(raised)
        assert line.startswith(f"{place}:") if place else line is None


def test_node_that_fails_without_a_word_is_a_difference():
    def fail():
        raise AssertionError

    graph = Graph()
    graph.output((graph.call_function(fail),))
    found = difference_at(GraphModule({}, graph), {})
    assert found.actual == "an error (AssertionError)"
