"""Compare the bundle of a model with a new trace: the mechanism behind all conditions.

Conditions refuse at once what they know; this finds everything else that changes the graph. No code
is generated, and no layer is copied. It imports Dynamo, so it runs beside serving or before the
first step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import starmap
from typing import Any

from ..errors import GuardUnproved, Specialized
from ..torch_compat.tracing.sources import drop_sources, next_source
from .guards.trace_with_guards import GuardedTrace, split_instead, trace_with_guards
from .ir.compilation import CompileRequest
from .ir.plan import Plan
from .plan.split_model import plan_of, split_model

_SIZE = re.compile(r"\bs\d+\b")
"""A symbol of torch: its number says nothing."""

_VALUE = re.compile(r"(\w+)(?::| =)")
"""The name of a value where it is computed: copies of layers have other ones."""

COMPARED = (
    "inputs", "constants", "containers", "weights", "symbols", "steps", "results", "structure",
    "parameters",
)  # fmt: skip
"""The parts of a plan that follow from the trace. Ranges, proofs and other checks come later."""


def trace_difference(request: CompileRequest, plan: Plan) -> str | None:
    """How a new trace differs from the one that `plan` was made from; None if it does not.

    Names the first piece and node that differ, with the user's line. It is traced without the
    copies of equal layers that a cold start makes. Raises where it cannot be traced, or not under
    the state of the request: that is no difference.
    """
    request = replace(request, copies_layers=False)
    first = next_source()
    try:
        traces = trace_with_guards(request)
        difference = _difference(request, traces, plan)
        if difference is not None:
            # a compiler may have refused the trace with unbacked sizes
            split = split_instead(request, traces)
            if split is not None and _difference(request, split, plan) is None:
                return None
    except (GuardUnproved, Specialized) as error:  # of a finished trace
        return f"its guards do not hold for the model as it is now: {error}"
    finally:
        drop_sources(range(first, next_source()))
    return difference


def _difference(request: CompileRequest, traces: Sequence[GuardedTrace], plan: Plan) -> str | None:
    request.checkpoint()
    traced = plan_of(split_model(traces, request.events), [()] * len(traces))
    before, after = _traces(plan), _traces(traced)
    if len(before) != len(after):
        return f"it has {len(before)} traces, the model has {len(after)} now"
    return next(filter(None, starmap(_difference_of_traces, zip(before, after, strict=True))), None)


def _traces(plan: Plan) -> list[Plan]:
    """Those of all traces, as they were joined and as a bundle has them: a plan that was not
    compiled has no ranges."""
    plan = Plan.model_validate_json(plan.model_dump_json())
    return [each for form in (plan, *plan.forms) for each in (form, *form.others)]


def _difference_of_traces(plan: Plan, now: Plan) -> str | None:
    for index, (before, after) in enumerate(zip(plan.pieces, now.pieces, strict=False)):
        if before.digest != after.digest:
            name = f"piece {index} of {len(plan.pieces)}"
            return f"{name}: {_first_line(before.text, after.text)}"
    if len(plan.pieces) != len(now.pieces):
        return f"it has {len(plan.pieces)} pieces, the model has {len(now.pieces)} now"
    for part in COMPARED:
        if (change := _change(getattr(plan, part), getattr(now, part))) is not None:
            return f"{part}: {change}"
    missing = [check.expression for check in now.checks if check not in plan.checks]
    return f"it does not check {missing[0]}" if missing else None


def _first_line(before: str, after: str) -> str:
    """The first line of two annotated graphs that differs."""
    stored, current = _nodes(before), _nodes(after)
    for (was, old, _), (now, node, where) in zip(stored, current, strict=False):
        if was != now:
            return f"it has `{old}`, the model has `{node}` now, at {where or 'no known line'}"
    _, more, where = (stored + current)[-1] if stored or current else ("", "nothing", "")
    if len(stored) == len(current):
        return f"a value that its nodes hold differs, near {where or more}"
    return f"it has {len(stored)} nodes, the model has {len(current)} now"


def _nodes(source: str) -> list[tuple[str, str, str]]:
    """Each line of code of an annotated graph, with values by number and as it is, and the user's
    line in the comment above it."""
    nodes, where, names = [], "", dict[str, str]()
    for line in map(str.strip, source.splitlines()):
        if line.startswith("#"):
            where = line.removeprefix("#").strip()
        elif line:
            line = _SIZE.sub("s", line)
            if (value := _VALUE.match(line)) is not None:
                names[value[1]] = f"%{len(names)}"
            numbered = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), line)
            nodes.append((numbered, line, where))
    return nodes


def _change(before: Any, after: Any) -> str | None:
    if before == after:
        return None
    if isinstance(before, tuple) and isinstance(after, tuple):
        if len(before) != len(after):
            return f"{len(before)} in the bundle, {len(after)} now"
        before, after = next((a, b) for a, b in zip(before, after, strict=True) if a != b)
    return f"{before} in the bundle, {after} now"
