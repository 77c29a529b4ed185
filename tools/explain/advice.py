"""Warnings and what to do about them: one function for each rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
        _background,
        _guards,
        _opaque,
        _failed,
        _without_graph,
        _padding,
        _unused,
    )
    return [{"what": what, "todo": todo} for rule in rules for what, todo in rule(facts)]


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
    if cache["not_cacheable"]:
        yield (
            f"no start of this model can be warm: it relies on {'; '.join(cache['not_cacheable'])}",
            "Let the model read plain values there; see Conditions in docs/cache.md.",
        )
    elif not cache["hit"] and settings["compile"] and settings.get("cache", True):
        yield (
            f"this start was cold: {cache['reason']}",
            "Build the bundle beforehand with `piecegraph cache warm`;"
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


def _background(facts: Facts) -> Advice:
    background = facts["background"]
    if background and background["state"] == "failed":
        yield (
            f"the model is served uncompiled: {background['failures'][-1]['reason']}",
            "Correct the cause; without bundle=serve the same start raises the error.",
        )


def _guards(facts: Facts) -> Advice:
    for guard in facts["guards"]:
        if not guard["proved"]:
            yield (
                f"guard {guard['expression']} at {guard['where']} is not proved"
                f" (policy {facts['policy']})",
                "Make the model independent of it, or narrow the served range.",
            )


def _opaque(facts: Facts) -> Advice:
    for row in facts["opaque_ops"]:
        yield (
            f"compiled pieces call {row['op']} {row['calls']} times a step, Python at"
            f" {row['where']}: nothing is fused with it",
            "Lower it by a pass in codegen.passes, or let the model call what it is made of.",
        )


def _failed(facts: Facts) -> Advice:
    for failure in facts["failed"]:
        yield (
            f"entry {failure['graph_index']} could not be captured: {failure['reason']}",
            "Its batches run in a lower mode; drop the size or correct the op that is named.",
        )


def _without_graph(facts: Facts) -> Advice:
    total = sum(row["count"] for row in facts["reasons"])
    for row in facts["reasons"]:
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
    idle = [row for row in facts["captures"] if row["captured"] and not row["steps"]]
    missed = facts["remarks"]["steps"]  # they are unused for that reason
    if idle and not missed and sum(row["count"] for row in facts["reasons"]) >= ENOUGH_STEPS:
        seconds = sum(row["ms"] for row in idle) / 1000
        yield (
            f"{len(idle)} recordings were never replayed; capturing them took {seconds:.2f} s",
            "If traffic is always like this, leave those sizes out or choose the strategy LAZY.",
        )
