"""Progress: plain lines without a terminal, a bar on a terminal."""

import io
import logging
import re
import time

import pytest
from rich.console import Console

from piecegraph.events import Events
from piecegraph.tools.serve.progress import LINES, counting, starting


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


def test_the_seconds_of_a_start_tick_on_a_terminal():
    stream = io.StringIO()
    with starting(Console(file=stream, force_terminal=True), Events()):
        while len(set(re.findall(r"(\d+\.\d) s  preparing", stream.getvalue()))) < 3:
            time.sleep(0.05)


@pytest.mark.parametrize("terminal", [False, True])
def test_a_start_says_its_phase_and_piece_and_what_it_waits_for(terminal):
    stream, events = io.StringIO(), Events()
    of_model = Events(parent=events)
    with starting(Console(file=stream, force_terminal=terminal), events):
        with of_model.span("trace.dynamo", level=logging.INFO):
            pass
        of_model.emit("compile.jobs", jobs=3, stored=1)
        of_model.emit("compile.start", range=[1, 8])
        time.sleep(0.2 if terminal else 0)  # a status is drawn a few times a second
        assert "s  compiling piece 1 of 3, for 1 to 8 tokens" in stream.getvalue()
        of_model.emit("compile.end", range=[1, 8])
        of_model.emit("compile.end", range=[1, 8])
        time.sleep(0.2 if terminal else 0)
        shown = stream.getvalue()
        of_model.emit("cache.wait", layer="remote:s3://bucket/[1]")
        of_model.emit("cache.wait")
    assert "s  compiled piece 2 of 3, for 1 to 8 tokens" in shown
    assert not events.listeners + events.phase_listeners
    if not terminal:
        lines = [line.partition("s  ")[2] for line in stream.getvalue().splitlines()]
        assert lines[:2] == ["tracing", "compiling 3 pieces, 1 from the cache"]
        assert lines[-2:] == [
            "waiting for another machine that compiles this model, in remote:s3://bucket/[1]",
            "waiting for another process that compiles this model",
        ]
