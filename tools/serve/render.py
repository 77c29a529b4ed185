"""The main job's report as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..report.tables import size, table
from .report import Report


def render(report: Report, console: Console) -> None:
    """Print a report built by `build_report`."""
    console.print(_startup(report["startup"]))
    console.print(_facts(report))
    console.print(_captures(report["captures"]))
    console.print(_dispatch(report["dispatch"]))
    console.print(_latency(report["latency"]))
    console.print(_serving(report["serving"]))
    console.print(_verdict(report["verification"]))


def _startup(startup: Report) -> Table:
    """One line a phase; phases of the same name, such as look-ups, share theirs.

    The sum of `prepare` stands below what it is the sum of, above the captures.
    """
    times: dict[str, list[float]] = {}
    for phase in startup["phases"]:
        times.setdefault(phase["name"], []).append(phase["seconds"])
    captures = times.pop("capture", None)
    times["prepare in all"] = [startup["prepare_seconds"]]
    if captures is not None:
        times["capture"] = captures
    rows = [(name, len(spent), f"{sum(spent):.3f}") for name, spent in times.items()]
    return table("Startup", ("phase", "times", "seconds"), rows)


def _facts(report: Report) -> Table:
    cache, pieces, mode = report["cache"], report["pieces"], report["graph_mode"]
    counters = report["counters"]
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    found = "hit" if cache["hit"] else "miss"
    why = f": {cache['reason']}" if cache.get("reason") else ""
    ranges = _join(f"{low} to {high}" for low, high in pieces["ranges"])
    stored = f"{cache['entries']} entries, {size(cache['bytes'])}"
    rows = {
        "cache": f"{found}{why} ({stored})",
        "compiled": f"{counters['dynamo_traces']} Dynamo traces,"
        f" {counters['inductor_compiles']} Inductor compiles",
        "pieces": f"{pieces['total']}, {pieces['unique']} of them unique,"
        f" in {pieces['segments']} segments; tokens {ranges}",
        "graph mode": f"{mode['resolved']} ({mode['requested'] or 'no mode'} was asked for)",
    }
    if mode["reasons"]:
        rows["why"] = "; ".join(mode["reasons"])
    for name, fact in rows.items():
        grid.add_row(name, Text(fact))
    return grid


def _captures(captures: Sequence[Report]) -> Table:
    rows = [(c["mode"], c["num_tokens"], f"{c['ms']:.2f}", size(c["bytes"])) for c in captures]
    return table("Captures", ("mode", "tokens", "ms", "memory"), rows)


def _dispatch(dispatch: Sequence[Report]) -> Table:
    """Steps by mode and padded size; steps without a graph have any size and share a line."""
    graphs = [entry for entry in dispatch if entry["mode"] != "NONE"]
    without = [entry for entry in dispatch if entry["mode"] == "NONE"]
    rows = [_dispatch_row(entry["mode"], str(entry["num_tokens"]), [entry]) for entry in graphs]
    if without:
        tokens = [entry["num_tokens"] for entry in without]
        rows.append(_dispatch_row("NONE", f"{min(tokens)} to {max(tokens)}", without))
    rows.append(_dispatch_row("all", "", dispatch))
    return table("Dispatch", ("mode", "tokens", "steps", "padding rows"), rows)


def _dispatch_row(mode: str, tokens: str, entries: Sequence[Report]) -> tuple[str, ...]:
    steps = sum(entry["count"] for entry in entries)
    rows = sum(entry["count"] * entry["num_tokens"] for entry in entries)
    padding = sum(entry["padded_tokens"] for entry in entries)
    return mode, tokens, str(steps), f"{padding / rows:.1%}" if rows else "-"


def _latency(latency: Report) -> Table:
    rows = [
        (name.replace("_", " "), *(_ms(value) for value in summary.values()))
        for name, summary in latency.items()
    ]
    return table("Latency, ms", ("", "median", "p90", "p99"), rows)


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _serving(serving: Report) -> Text:
    return Text(
        f"served {serving['requests']} requests ({serving['prompt_tokens']} prompt tokens,"
        f" {serving['generated_tokens']} generated) in {serving['steps']} steps"
        f" and {serving['seconds']:.2f} s: {serving['generated_tokens_per_second']:.0f} tokens/s,"
        f" {serving['requests_per_second']:.1f} requests/s,"
        f" {serving['preemptions']} preemptions"
    )


def _verdict(verification: Report) -> Text:
    if not verification["ok"]:
        mismatch = verification["mismatch"]
        return Text(
            f"verification FAILED at step {mismatch['step']} ({mismatch['mode']},"
            f" descriptor {mismatch['descriptor']}): {mismatch['what']}",
            style="bold red",
        )
    if not verification["steps"]:
        return Text("not verified", style="yellow")
    return Text(
        f"verified {verification['steps']} steps against the eager model:"
        f" largest difference {verification['max_abs_diff']:.2g}",
        style="green",
    )


def _join(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items) or "none"
