"""Results of `bench serve` and `bench latency`: summed up over rounds, and two files compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from piecegraph.tools.report.sections import ReportSection, Table, columns

SCHEMA = 1

Facts = dict[str, Any]

HIGHER_IS_BETTER = (
    "requests_per_second", "output_tokens_per_second", "tokens_per_second", "goodput", "good_share",
)  # fmt: skip
NOTICED = 0.05
"""Medians that differ by less than this share are called equal."""

COMPARED = (
    ("output_tokens_per_second", None),
    ("goodput", None),
    ("ttft_ms", "p50"),
    ("ttft_ms", "p99"),
    ("tpot_ms", "p50"),
    ("tpot_ms", "p99"),
    ("e2e_ms", "p50"),
    ("e2e_ms", "p99"),
)


FEW = 2
"""With more combinations than this a table has medians only."""


def summed_up(runs: Sequence[Facts], keys: Sequence[str]) -> list[Facts]:
    """A row for each combination of `keys`: median, least and most of each figure over rounds."""
    groups: dict[tuple[Any, ...], list[Facts]] = {}
    for run in runs:
        groups.setdefault(tuple(run[key] for key in keys), []).append(run)
    rows = []
    for names, rounds in groups.items():
        figures = {
            name: _over(rounds, name)
            for name in rounds[0]
            if name not in (*keys, "round", "errors")
        }
        rows.append({**dict(zip(keys, names, strict=True)), "rounds": len(rounds), **figures})
    return rows


def _over(rounds: Sequence[Facts], name: str) -> Any:
    values = [run[name] for run in rounds]
    if isinstance(values[0], Mapping):
        return {part: _over(values, part) for part in values[0]}
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    return {"median": median(numbers), "min": min(numbers), "max": max(numbers)}


def compare(old: Facts, new: Facts) -> Facts:
    """Each figure of each combination that both have, with a verdict; and what else differs.

    A figure is better or worse if the rounds of the two do not overlap and the medians differ by
    a twentieth. With fewer than three rounds on a side the verdict says so.
    """
    rows = []
    later = {_place(row): row for row in new["summary"]}
    for row in old["summary"]:
        other = later.get(_place(row))
        if other is None:
            continue
        for name, part in COMPARED:
            one, two = _cell(row, name, part), _cell(other, name, part)
            if one is not None and two is not None:
                few = min(row["rounds"], other["rounds"]) < 3
                rows.append(
                    {
                        "place": _place(row),
                        "figure": f"{name} {part}" if part else name,
                        "old": one,
                        "new": two,
                        "ratio": two["median"] / one["median"] if one["median"] else None,
                        "verdict": _verdict(name, one, two, few),
                    }
                )
    return {
        "rows": rows,
        "differs": [
            f"{part}.{name}: {old[part].get(name)} -> {new[part].get(name)}"
            for part in ("versions", "machine", "load")
            for name in {**old[part], **new[part]}
            if old[part].get(name) != new[part].get(name) and name != "load"
        ],
        "only_old": [_place(row) for row in old["summary"] if _place(row) not in later],
    }


def _place(row: Facts) -> str:
    names = ("mode", "strategy", "rate", "batch", "input", "output")
    return " ".join(f"{row[name]}" for name in names if row.get(name) is not None)


def _cell(row: Any, name: str, part: str | None) -> Any:
    cell = row.get(name)
    return cell.get(part) if cell is not None and part is not None else cell


def _verdict(name: str, old: Facts, new: Facts, few: bool) -> str:
    apart = new["min"] > old["max"] or new["max"] < old["min"]
    change = abs(new["median"] - old["median"])
    if not apart or change < NOTICED * abs(old["median"]):
        return "no difference"
    better = (new["median"] > old["median"]) == (name in HIGHER_IS_BETTER)
    return ("better" if better else "worse") + (", fewer than 3 rounds" if few else "")


def comparison_section(result: Facts) -> ReportSection:
    """The comparison as a table, with what else differs as notes."""
    table = [
        (
            row["place"],
            row["figure"],
            _spread(row["old"]),
            _spread(row["new"]),
            f"{row['ratio']:.2f}" if row["ratio"] else None,
            row["verdict"],
        )
        for row in result["rows"]
    ]
    heads = columns("what", "figure", "old", "new", "ratio", "verdict", figure="text")
    notes = [f"differs: {each}" for each in result["differs"]]
    notes += [f"only in the first file: {each}" for each in result["only_old"]]
    return ReportSection("Median (least to most)", [Table(table, heads)], notes)


def summary_section(summary: Sequence[Facts]) -> ReportSection:
    """The figures of a run as a table; with the least and the most if they fit into a terminal."""
    few = len(summary) <= FEW
    title = "median of the rounds" + (" (least to most)" if few else "")
    names = ["figure", *map(_place, summary)]
    rows = []
    for name, part in COMPARED:
        cells = [_cell(row, name, part) for row in summary]
        shown = [
            _spread(cell) if few or cell is None else f"{cell['median']:.4g}" for cell in cells
        ]
        head = f"{name.removesuffix('_ms')} {part} ms" if part else name.replace("_", " ")
        rows.append((head, *shown))
    return ReportSection("Serving", [Table(rows, columns(*names), title)])


def _spread(cell: Any) -> str:
    if cell is None:
        return "-"
    return f"{cell['median']:.4g} ({cell['min']:.4g} to {cell['max']:.4g})"
