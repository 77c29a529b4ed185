"""Events: counters, spans, and what reaches the log and torch's trace."""

import ast
import logging
import sys
import time
from pathlib import Path

import pytest

from piecegraph import Events
from piecegraph.events import log, trace_artifact
from tests.processes import output_of

ROOT = Path(__file__).parents[1]
OUTPUT = {"events.py", "tools/start_lines.py"}
"""Files that may read events: they show them."""


@pytest.fixture
def lines():
    """The log's lines at INFO, with their levels."""
    found = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    log.addHandler(handler)
    before = log.level
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(before)


def test_a_phase_is_one_line_with_seconds_at_info(lines):
    events = Events()
    with events.span("prepare", level=logging.INFO):
        with events.span("compile.piece", piece=1):
            events.emit("compile.start", piece=1)
    ((level, line),) = lines
    assert level == "INFO"
    name, seconds, unit = line.split()
    assert (name, unit) == ("prepare:", "s")
    assert float(seconds) >= 0


def test_decisions_are_for_debug_and_warnings_above(lines):
    events = Events()
    events.emit("capture.failed", level=logging.WARNING, slot=3)
    log.setLevel(logging.DEBUG)
    events.emit("split", pieces=3)
    assert lines == [("WARNING", "capture.failed slot=3"), ("DEBUG", "split pieces=3")]


def test_a_span_is_kept_and_logged_when_the_work_raises(lines):
    events = Events()
    with pytest.raises(ZeroDivisionError), events.span("split", level=logging.INFO):
        raise ZeroDivisionError
    assert [span.name for span in events.spans] == ["split"]
    assert len(lines) == 1
    with events.span("next"):
        assert events.spans[-1].depth == 0


def test_a_listener_that_takes_itself_off_silences_nobody():
    events, heard = Events(), []

    def once(event):
        events.listeners.remove(once)

    events.listeners += [once, lambda event: heard.append(event.name)]
    events.emit("capture.recorded")
    assert heard == ["capture.recorded"]


DETAILS = """
import logging
from piecegraph.events import Events
events = Events()
events.detail("split_graph", lambda: 1 / 0)
detailed = Events(detailed=True)
detailed.detail("split_graph", lambda: {"steps": []})
assert detailed.named("split_graph")[0].facts == {"steps": []}
logging.getLogger("piecegraph").setLevel(logging.DEBUG)
events.detail("split_graph", lambda: {"steps": []})
assert len(events.events) == 1
"""


@pytest.mark.slow
def test_details_are_made_only_where_somebody_looks():
    """In a process of its own: pytest's log capture counts as a reader."""
    output_of(sys.executable, "-c", DETAILS)


def test_texts_are_made_for_a_trace_alone(monkeypatch):
    from torch._logging._internal import trace_log

    trace_artifact("graph", lambda: 1 / 0)
    records, handler = [], logging.Handler()
    handler.emit = records.append
    monkeypatch.setattr(trace_log, "handlers", [handler])
    trace_artifact("graph", lambda: "text")
    assert records[0].metadata["artifact"]["name"] == "piecegraph_graph"
    assert "text" in str(records[0].payload)


def test_the_log_has_a_bound_and_counts_what_it_dropped():
    events = Events(kept=3)
    for n in range(5):
        events.emit("split", n=n)
        with events.span("forecast", n=n):
            pass
    assert [event.facts["n"] for event in events.named("split")] == [2, 3, 4]
    assert events.dropped == 2
    assert len(events.spans) == 3


def test_phases_log_their_own_seconds_and_the_outermost_what_is_left(lines):
    events = Events()
    with events.span("prepare", level=logging.INFO):
        with events.span("detail"), events.span("trace", level=logging.INFO):
            time.sleep(0.02)
        with pytest.raises(KeyError), events.span("split", level=logging.INFO):
            raise KeyError
    prepare, trace, split = events.phases
    assert (trace.own, split.own) == (trace.seconds, split.seconds)
    assert prepare.own == pytest.approx(prepare.seconds - trace.seconds - split.seconds)
    assert lines[-1][1] == f"prepare: {prepare.seconds:.3f} s, other: {prepare.own:.3f} s"
    with events.span("capture", level=logging.INFO):  # nothing of an earlier phase is open
        pass
    assert events.phases[-1].own == events.phases[-1].seconds


def test_events_of_one_model_are_its_own_and_its_parents(lines):
    shared = Events()
    heard = []
    shared.listeners.append(heard.append)
    one, other = Events(parent=shared), Events(parent=shared)
    one.emit("capture", level=logging.INFO, n=1)
    other.count("steps")
    with other.span("prepare", level=logging.INFO):
        pass
    assert (len(one.events), len(other.events), len(shared.events)) == (1, 0, 1)
    assert [event.name for event in heard] == ["capture"]
    assert (one.counters["steps"], shared.counters["steps"]) == (0, 1)
    assert [span.name for span in shared.phases] == ["prepare"]
    assert len(lines) == 2


def test_who_wants_to_know_hears_of_a_phase_when_it_begins():
    events, begun = Events(), []
    events.phase_listeners.append(begun.append)
    with events.span("detail"), events.span("phase", level=logging.INFO):
        assert begun == ["phase"]


def test_nobody_reads_events_to_learn_something():
    """What a program acts on is a record, which its owner returns or keeps."""
    readers = {
        str(path.relative_to(ROOT))
        for package in (".", "cache", "compile", "dispatch", "runtime", "tools", "torch_compat")
        for path in (ROOT / package).glob("*.py" if package == "." else "**/*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "listeners")
        or (isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "named")
    }
    assert readers == OUTPUT


def test_warnings_are_counted_by_event_with_their_newest_facts():
    above = Events()
    events = Events(parent=above)
    for n in range(6):
        events.emit("slow", level=logging.WARNING, n=n)
        events.emit("fine", n=n)
    expected = [{"event": "slow", "count": 6, "newest": [{"n": n} for n in (2, 3, 4, 5)]}]
    assert events.warnings() == above.warnings() == expected
