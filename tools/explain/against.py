"""What differs between two explanations: two starts, cold and warm, or two ranks of one model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ..report.sections import ReportSection, Table, columns

Facts = dict[str, Any]

SCHEMA = 2

SLOWER, FASTER = 1.25, 0.8
NOTICED_SECONDS = 0.05
"""A phase is listed if it changed by these factors and by at least this time."""


def differences(old: Facts, new: Facts) -> list[Facts]:
    """`{part, what, old, new}` of everything that differs, in the order of a startup and a run."""
    rows = [("versions", *row) for row in _changed(old.get("versions"), new.get("versions"))]
    rows += [("machine", *row) for row in _changed(_fixed(old), _fixed(new))]
    rows += [("options", *row) for row in _changed(old.get("options"), new.get("options"))]
    rows += [("settings", *row) for row in _changed(old["settings"], new["settings"])]
    rows += [("cache", *row) for row in _changed(_cache(old), _cache(new))]
    rows += [("keys", *row) for row in _changed(_factors(old), _factors(new))]
    rows += [("pieces", *row) for row in _changed(_pieces(old), _pieces(new))]
    rows += [("graph mode", *row) for row in _changed(old["graph_mode"], new["graph_mode"])]
    rows += [("capture plan", *row) for row in _changed(_captures(old), _captures(new))]
    rows += [("phases", *row) for row in _phases(old, new)]
    rows += [("dispatch", *row) for row in _changed(_dispatch(old), _dispatch(new))]
    return [dict(zip(("part", "what", "old", "new"), row, strict=True)) for row in rows]


def against_section(rows: list[Facts], old: Facts) -> ReportSection:
    """The differences as a table."""
    cells = [(row["part"], row["what"], row["old"], row["new"]) for row in rows]
    heads = columns("part", "what", "old", "new", what="text", old="text", new="text")
    note = f"Old: {' '.join(old.get('command') or ['?'])}, {old.get('created')}."
    return ReportSection(
        "Against",
        [Table(cells, heads, empty="Nothing differs.")],
        [note, f"Phases are listed that changed by a quarter and {NOTICED_SECONDS} s."],
        id="against",
    )


def _changed(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Path, old and new value of each leaf that differs; mappings are compared by key."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        for key in [*old, *(key for key in new if key not in old)]:
            path = f"{name}.{key}" if name else str(key)
            yield from _changed(old.get(key), new.get(key), path)
    elif old != new:
        yield name, _shown(old), _shown(new)


def _shown(value: Any) -> str:
    return "-" if value is None else str(value)[:200]


def _fixed(facts: Facts) -> Facts:
    """What does not change on one machine from run to run."""
    machine = facts.get("machine") or {}
    return {name: value for name, value in machine.items() if name != "load"}


def _cache(facts: Facts) -> Facts:
    return {name: facts["cache"].get(name) for name in ("hit", "reason")}


def _factors(facts: Facts) -> Facts:
    """Factors of the bundle's key; those of artifacts follow from the pieces."""
    return next((row["factors"] for row in facts["lookups"] if row["kind"] == "bundle"), {})


def _pieces(facts: Facts) -> Facts:
    """Unique pieces by digest: their uses and kernels."""
    return {
        f"{piece['digest'][:12]} (piece {piece['piece']})": {
            "used by": piece["used_by"],
            "made": piece["made"],
            "kernels": piece["kernels"],
        }
        for piece in facts["pieces"]
    }


def _captures(facts: Facts) -> Facts:
    return {
        f"{row['mode']} {row['num_tokens']}": {
            "captured": row["captured"],
            "segments": row["segments"],
            "bytes": row["bytes"],
        }
        for row in facts["captures"]
    }


def _dispatch(facts: Facts) -> Facts:
    return {f"{row['mode']}, {row['reason']}": row["count"] for row in facts["reasons"]}


def _phases(old: Facts, new: Facts) -> Iterator[tuple[str, str, str]]:
    before, after = _seconds(old), _seconds(new)
    for name in [*before, *(name for name in after if name not in before)]:
        one, two = before.get(name, 0.0), after.get(name, 0.0)
        if abs(two - one) >= NOTICED_SECONDS and not FASTER * one < two < SLOWER * one:
            yield name, f"{one:.3f} s", f"{two:.3f} s"


def _seconds(facts: Facts) -> Counter[str]:
    """Seconds of the timeline by name; time that no part explains by the span it is in."""
    sums: Counter[str] = Counter()
    for row in facts["timeline"]:
        name = f"other {row['facts']}" if row["name"] == "other" else row["name"]
        sums[name] += row["seconds"]
    return sums
