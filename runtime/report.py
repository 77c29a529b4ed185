"""What a prepared model did, as data: the library's part of the report (schema: docs/report.md)."""

from __future__ import annotations

from typing import Any

from ..cache import Cache
from ..cache.listing import blob_names, entry_names
from ..compile.ir.plan import Plan
from ..dispatch import ResolvedMode
from ..events import Events, Span
from .memory.ledger import MemoryLedger
from .step.usage import Usage


def build_report(
    events: Events,
    plan: Plan,
    resolved: ResolvedMode,
    usage: Usage,
    cache: Cache,
    ledger: MemoryLedger,
) -> dict[str, Any]:
    """All of it is JSON-able; times are in seconds unless named `ms`, sizes in bytes."""
    bundle = events.named("bundle")[-1].facts
    prepare = [span for span in events.spans if span.name == "prepare"][-1]
    return {
        "startup": {
            "phases": [
                {"name": span.name, "seconds": span.seconds} for span in startup_phases(events)
            ],
            "prepare_seconds": prepare.seconds,
        },
        "cache": {
            "hit": bundle["hit"],
            "reason": bundle.get("reason"),
            **_stored(cache),
        },
        "counters": {
            "dynamo_traces": events.counters["dynamo_traces"],
            "inductor_compiles": events.counters["inductor_compiles"],
            **{name: n for name, n in sorted(events.counters.items()) if name.startswith("cache.")},
        },
        "pieces": {
            "total": len(plan.piece_uses()),
            "unique": len(plan.pieces),
            "segments": plan.segments(),
            "partitions": plan.partitions(),
            "ranges": [[symbol.low, symbol.high] for symbol in plan.symbols],
        },
        "graph_mode": {
            "requested": resolved.requested and resolved.requested.value,
            "resolved": resolved.mode.value,
            "reasons": mode_reasons(resolved),
        },
        "captures": [event.facts for event in events.named("capture")],
        "memory": ledger.rows(),
        "memory_forecast": [event.facts for event in events.named("memory.accuracy")],
        "warmup": [event.facts for event in events.named("warmup")],
        "skipped_warmup": [event.facts for event in events.named("warmup.skipped")],
        "dispatch": usage.rows(),
        "reasons": usage.reasons(),
    }


def mode_reasons(resolved: ResolvedMode) -> list[str]:
    """Why the graph mode is not the one that was asked for, in order."""
    return [f"{change.after.value}: {change.why}" for change in resolved.reasons]


def startup_phases(events: Events) -> list[Span]:
    """What startup consists of, in order; a name can occur more than once."""
    return [
        span
        for span in events.spans
        if span.name in ("capture", "toolchain")
        or (span.depth == 1 and span.name != "capture.session")
    ]


def _stored(cache: Cache) -> dict[str, int]:
    """Entries in the private directory, and the bytes of all blobs."""
    if cache.private is None:
        return {"entries": 0, "bytes": 0}
    root = cache.private.root
    sizes = [(root / name).stat().st_size for name in blob_names(root)]
    return {"entries": len(list(entry_names(root))), "bytes": sum(sizes)}
