"""Progress: plain lines without a terminal, a bar on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from piecegraph.tools.serve.progress import LINES, counting, working


@pytest.mark.parametrize("total", [1, 7, 64, 1000])
def test_plain_lines_are_few_and_the_last_one_is_the_end(total):
    stream = io.StringIO()
    with counting(Console(file=stream), "serving", total) as advance:
        for _ in range(total):
            advance(1)
    lines = stream.getvalue().splitlines()
    assert 1 <= len(lines) <= LINES
    assert lines[-1] == f"serving: {total} of {total}"


def test_a_terminal_gets_a_bar_that_goes_away():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True)
    with counting(console, "serving", 3) as advance:
        advance(3)
    assert "100%" in stream.getvalue()


def test_a_terminal_sees_work_without_a_measure():
    stream = io.StringIO()
    with working(Console(file=stream, force_terminal=True), "preparing"):
        pass
    assert "preparing" in stream.getvalue()


def test_work_without_a_measure_is_one_line():
    stream = io.StringIO()
    with working(Console(file=stream), "preparing"):
        pass
    assert stream.getvalue() == "preparing …\n"
