"""The timeline is a Chrome trace: complete events nested on one track, steps on another."""

from __future__ import annotations

import json

from piecegraph import Events
from piecegraph.tools.engine.serving_log import StepRecord
from piecegraph.tools.explain.timeline import MAX_STEPS, chrome_trace


def step(seconds):
    return StepRecord("FULL", 3, 4, 3, 0, seconds)


def test_spans_nest_and_steps_follow_the_startup():
    events = Events()
    with events.span("prepare"):
        with events.span("split", pieces=3):
            events.emit("guard", expression="True")
    trace = chrome_trace(events, [step(0.5), step(0.25)])
    assert json.loads(json.dumps(trace)) == trace
    found = trace["traceEvents"]
    outer, inner = (next(e for e in found if e["name"] == name) for name in ("prepare", "split"))
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
    assert inner["args"] == {"pieces": 3}
    instant = next(e for e in found if e["ph"] == "i")
    assert inner["ts"] <= instant["ts"] <= inner["ts"] + inner["dur"]
    first, second = (e for e in found if e["name"] == "FULL 4")
    assert first["ts"] >= outer["ts"] + outer["dur"]
    assert second["ts"] == first["ts"] + first["dur"]
    assert (first["dur"], second["dur"]) == (0.5e6, 0.25e6)
    assert first["args"]["num_tokens"] == 3


def test_no_more_than_the_first_steps_are_in_it():
    trace = chrome_trace(Events(), [step(0.001)] * (MAX_STEPS + 5))
    assert sum(e["name"] == "FULL 4" for e in trace["traceEvents"]) == MAX_STEPS
