"""What could be better, and what to do about it: warnings, and one function for each rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .warnings import advice_of

Facts = dict[str, Any]

MUCH_PADDING = 0.2
MANY_WITHOUT = 0.2
ENOUGH_STEPS = 10
"""With fewer steps than this, statistics about sizes are not reported."""


def advise(facts: Facts) -> list[Facts]:
    """`{what, todo}` of everything that could be better."""
    rules = (
        _verification,
        _remarks,
        _cache,
        _import,
        _guards,
        _without_graph,
        _padding,
        _unused,
    )
    advice = [*advice_of(facts["warnings"]), *(each for rule in rules for each in rule(facts))]
    return [{"what": what, "todo": todo} for what, todo in advice]


LONG_IMPORT = 0.5
"""Seconds from which an import is worth a rule."""

Advice = Iterator[tuple[str, str]]


def _verification(facts: Facts) -> Advice:
    if facts["verification"] and not facts["verification"]["ok"]:
        yield "a step differed from the eager model", "Run `piecegraph bisect` with these options."


def _remarks(facts: Facts) -> Advice:
    for rows in facts["remarks"].values():
        yield from ((row["what"], row["todo"]) for row in rows)


def _cache(facts: Facts) -> Advice:
    cache = facts["cache"]
    settings = facts["settings"]
    uses_cache = settings["compile"] and settings.get("cache", True)
    if not cache["hit"] and not cache["not_cacheable"] and uses_cache:
        detail = f": {cache['detail']}" if cache.get("remedy") else ""
        yield (
            f"this start was cold: {cache['reason']}{detail}",
            cache.get("remedy")
            or "Build the bundle beforehand with `piecegraph cache warm`;"
            " `piecegraph cache why` tells what a miss differs in.",
        )


def _import(facts: Facts) -> Advice:
    spans = facts["timeline"]
    loads = [span for span in spans if span["name"] == "bundle.load"]
    imports = [
        span["seconds"]
        for load in loads
        for span in spans
        if span["name"] == "import inductor"
        and load["start"] <= span["start"] <= load["start"] + load["seconds"]
    ]
    if facts["cache"]["hit"] and imports and imports[0] > LONG_IMPORT:
        yield (
            f"this warm start imported Inductor, which took {imports[0]:.1f} s of the"
            f" {loads[0]['seconds']:.1f} s in `bundle.load`",
            "Run `piecegraph.compile_ahead(model, config)` once: it adds libraries to the bundle,"
            " which load without Inductor.",
        )


def _guards(facts: Facts) -> Advice:
    for guard in facts["guards"]:
        if not guard["proved"] and facts["policy"] == "check":
            yield (
                f"guard {guard['expression']} at {guard['where']} is checked at each step",
                "Make the model independent of it, or narrow the served range.",
            )


def _without_graph(facts: Facts) -> Advice:
    total = sum(row["count"] for row in facts["reasons"])
    for row in () if facts["remarks"]["steps"] else facts["reasons"]:  # which say it already
        if row["mode"] == "NONE" and row["count"] > MANY_WITHOUT * total and total >= ENOUGH_STEPS:
            yield (
                f"{row['count']} of {total} steps ran without a graph: {row['reason']}",
                "Capture larger sizes, or limit the tokens of a step to the largest size.",
            )


def _padding(facts: Facts) -> Advice:
    for row in facts["padding"]:
        if row["share"] > MUCH_PADDING and row["steps"] >= ENOUGH_STEPS:
            yield (
                f"{row['share']:.0%} of the rows of {row['mode']} {row['num_tokens']} were padding",
                f"Capture a size between the next smaller one and {row['num_tokens']}.",
            )


def _unused(facts: Facts) -> Advice:
    captured = [row for row in facts["captures"] if row["captured"]]
    idle = [row for row in captured if not row["steps"]]
    used = {row["mode"] for row in captured if row["steps"]}
    # sizes of a mode that no step ran, or that an engine's fault keeps from steps, are not unused
    fault = facts["remarks"]["steps"] or not {row["mode"] for row in idle} <= used
    if idle and not fault and sum(row["count"] for row in facts["reasons"]) >= ENOUGH_STEPS:
        seconds = sum(row["ms"] for row in idle) / 1000
        yield (
            f"{len(idle)} recordings were never replayed; capturing them took {seconds:.2f} s",
            "If traffic is always like this, leave those sizes out or choose the strategy LAZY.",
        )
