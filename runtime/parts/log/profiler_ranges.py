"""Ranges that profilers show: step, graph, piece with its layers, splitting op. Off by default."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch.profiler import profile, record_function

from ....compile.ir.plan import Plan
from ....compile.plan.codegen import Hook
from ....compile.plan.step_names import call_names, piece_names, ranged
from ....dispatch import Decision, PlanEntry
from ...capture.recording import Recording, SegmentKind, run_calls
from .step_log import StepObserver


def range_hooks(plan: Plan) -> tuple[Hook, Hook]:
    """The hooks of `CompiledModel.link` that put each piece and each splitting op into a range."""
    pieces, calls = piece_names(plan), call_names(plan)
    return (
        lambda use, piece: ranged(pieces[use], piece),
        lambda use, op: ranged(calls[use], op),
    )


def name_segments(recording: Recording, plan: Plan) -> None:
    """Replay each segment of `recording` in a range, by the pieces and ops that it holds."""
    graphs = [each for each in recording.segments if each.kind is SegmentKind.GRAPH]
    pieces, calls = iter(piece_names(plan)), iter(call_names(plan))
    one_per_piece = len(graphs) == len(plan.piece_uses()) > 1
    named, last = [], ""
    for segment in recording.segments:
        for index, call in enumerate(segment.calls):
            if segment.kind is SegmentKind.EAGER:
                name = next(calls, f"op {segment.names[index]}")
                last = f" after {segment.names[index]}" if not plan.calls() else ""
            else:
                name = next(pieces) if one_per_piece else f"graph {recording.name}{last}"
            named.append(ranged(name, call))
    recording.replay = partial(run_calls, tuple(named))


@contextmanager
def profiled(folder: Path, entry: PlanEntry) -> Iterator[None]:
    """Write a trace of the capture inside, of its warm-up run too, to `FULL_8.json` in `folder`."""
    with profile(record_shapes=True) as profiler, record_function(f"capture {entry.shape}"):
        yield
    name = re.sub(r"\W+", "_", entry.shape)
    profiler.export_chrome_trace(str(folder / f"{name}.json"))


class StepRanges(StepObserver):
    """Puts each step into a range: `step FULL 8 exact`."""

    def __init__(self) -> None:
        self._open: Any = None

    def began(self, decision: Decision, *step: Any) -> None:
        name = f"step {decision.mode.name} {decision.descriptor.num_tokens} {decision.reason.value}"
        self._open = record_function(name)
        self._open.__enter__()

    def ended(self, *step: Any) -> None:
        self._open.__exit__(None, None, None)
