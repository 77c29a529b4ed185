"""Compare a trace that copies equal layers with one that traces each."""

import contextlib
import json

import pytest
import torch

from piecegraph.compile.guards.trace_with_guards import trace_with_guards
from piecegraph.compile.pieces.fingerprint import canonical_text
from piecegraph.compile.plan.split_model import split_model

from .models import MIX
from .starts import request_of


def _conditions(data):
    """What is checked at each place; equal subtrees are stored once in `data`."""
    found = {}

    def below(number, path):
        here, inner = data["nodes"][number]
        if here:
            found[path] = {json.dumps(each) for each in here}
        for step, each in inner:
            below(each, (*path, json.dumps(step)))

    for root, top in data["roots"].items():
        below(top, (root,))
    return found


def facts_of_trace(model, **settings):
    """All that a trace leaves, and how many calls were copied."""
    torch._dynamo.reset()
    request = request_of(model, **{"splitting_ops": MIX, **settings})
    (guarded,) = traces = trace_with_guards(request)
    unique = [each.digest for each in split_model(traces, request.events)[0].unique]
    trace, data = guarded.trace, guarded.trace.conditions.data
    facts = {
        "graph": canonical_text(trace.graph.graph, trace.graph),
        "sources": [*map(str, trace.sources.values())],
        "pieces": unique,
        "conditions": _conditions(data),
        "same": sorted(map(json.dumps, data["same"])),
        "rest": [data["environment"], trace.conditions.obstacles],
    }
    return facts, request.events.counters["equal_modules"]


def _is_implied(same, others):
    """Whether two places hold one object because others, or those that they are below, do."""
    one, other = json.loads(same)
    rules = [*map(json.loads, others)]
    return bool(_first_place(one, rules) == _first_place(other, rules))


def _first_place(place, rules):
    """The place by which the trace reads an object first."""
    root, path = place
    for (_, later), (above, earlier) in [each for each in rules if each[0][0] == root]:
        if path[: len(later)] == later and later != earlier:
            return _first_place([above, earlier + path[len(later) :]], rules)
    return place


@contextlib.contextmanager
def with_parts_off(parts):
    """What PIECEGRAPH_OFF turns off, or nothing."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIECEGRAPH_OFF", parts)
        yield


def expect_equal_traces(model, **settings):
    """Trace with and without copies, compare, and return how many calls were copied."""
    with with_parts_off(""):
        found, copied = facts_of_trace(model, **settings)
    with with_parts_off("faster"):
        expected, none = facts_of_trace(model, **settings)
    assert none == 0
    places = found.pop("conditions")
    # of an object that layers share, Dynamo guards only what is at its first place
    for place, conditions in expected.pop("conditions").items():
        assert places[place] == conditions
    same = expected.pop("same")
    assert not {*same} - {*found["same"]}
    assert all(_is_implied(each, same) for each in found.pop("same"))
    for name, fact in expected.items():
        assert found[name] == fact, name
    return copied
