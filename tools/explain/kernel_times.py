"""Time by piece from a trace of torch.profiler, in which profiler ranges were on."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import InvalidSetting
from ..report.sections import ReportSection, Table, columns

_OURS = re.compile(r"^(piece \d+|op \S+|graph \S+ \d+)")
NAME = 12
"""Characters of a kernel's name in the table; `RangeTime.kernels` has all of it."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(slots=True)
class RangeTime:
    """All ranges of one piece, splitting op or FULL graph; times are in microseconds.

    `host` is the time of the host inside, `device` that of the kernels launched there, by name in
    `kernels`. Without a device `kernels` has torch's own operators.
    """

    name: str
    calls: int = 0
    host: float = 0.0
    device: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)


def time_by_range(trace: Path) -> list[RangeTime]:
    """Host and kernel time of each piece, splitting op and FULL graph, most first.

    `trace` is what `torch.profiler.profile.export_chrome_trace` writes. Raises InvalidSetting for a
    file that is none.
    """
    try:
        every = json.loads(trace.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise InvalidSetting(
            name="trace", value=str(trace), reason=str(error), expected="a profiler's trace"
        ) from error
    events = [event for event in every if event.get("ph") == "X"]
    ranges: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    times: dict[str, RangeTime] = {}
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event.get("cat") == "user_annotation" and (match := _OURS.match(event["name"])):
            ranges[event["tid"]].append(event)
            row = times.setdefault(match[1], RangeTime(match[1]))
            row.calls += 1
            row.host += event["dur"]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    on_host = () if kernels else [event for event in events if event.get("cat") == "cpu_op"]
    for event in (*kernels, *on_host):
        launch = launches.get(event.get("args", {}).get("correlation")) if kernels else event
        around = launch and _around(ranges.get(launch["tid"], ()), launch["ts"])
        if around is not None and (match := _OURS.match(around["name"])):
            row = times[match[1]]
            row.device += event["dur"] if kernels else 0.0
            row.kernels[event["name"]] += event["dur"]
    return sorted(times.values(), key=lambda row: -(row.device or row.host))


def _around(ranges: Sequence[Mapping[str, Any]], moment: float) -> Mapping[str, Any] | None:
    """The range of one thread that a moment is in; ranges of ours do not nest."""
    place = bisect_right(ranges, moment, key=lambda event: float(event["ts"])) - 1
    if place < 0 or moment > ranges[place]["ts"] + ranges[place]["dur"]:
        return None
    return ranges[place]


def profile_section(rows: Sequence[RangeTime]) -> ReportSection:
    """The times as a table, with the two kernels that take most."""
    total = sum(row.device or row.host for row in rows) or 1.0
    table = [
        (
            row.name,
            row.calls,
            f"{row.host / 1000:.2f}",
            f"{row.device / 1000:.2f}" if row.device else None,
            f"{(row.device or row.host) / total:.1%}",
            ", ".join(name[:NAME] for name, _ in row.kernels.most_common(2)),
        )
        for row in rows
    ]
    heads = columns("part", "calls", "host ms", "kernel ms", "share", "most in", most_in="text")
    return ReportSection("Time by piece", [Table(table, heads)])
