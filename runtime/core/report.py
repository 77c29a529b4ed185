"""What a prepared model did, as data: its part of the report of docs/metrics-and-report.md."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ...cache import Cache
from ...cache.names import blob_names, entry_names
from ...compile.ir.plan import Plan
from ...dispatch import ResolvedMode
from .records import (
    BackgroundFailure,
    BackgroundPhase,
    LibrariesBuilt,
    NotVerified,
    Record,
    Records,
    Stale,
    StartupRecord,
    Switched,
    Verified,
    record_kinds,
)
from .usage import Usage


def build_report(
    records: Records,
    plan: Plan,
    resolved: ResolvedMode,
    usage: Usage,
    cache: Cache,
) -> dict[str, Any]:
    """All of it is JSON-able; times are in seconds unless named `ms`, sizes in bytes."""
    bundle = records.compile.bundle
    counters = records.counters.copy()  # threads add to it
    of_startup = list(record_kinds(StartupRecord))
    return {
        "startup": {
            "before_prepare_seconds": records.before_prepare,
            "phases": [{"name": name, "seconds": own} for name, own in records.phases],
            "prepare_seconds": records.prepare_seconds,
        },
        "background": background_facts(records),
        "cache": {
            "hit": bundle is not None and bundle.hit,
            "reason": bundle.reason if bundle is not None else None,
            "detail": bundle.detail if bundle is not None else None,
            "remedy": bundle.remedy if bundle is not None else None,
            "verified": verified(records),
            "not_cacheable": list(records.compile.not_cacheable),
            **_stored(cache),
        },
        "counters": {
            "dynamo_traces": counters["dynamo_traces"],
            "inductor_compiles": counters["inductor_compiles"],
            **{name: n for name, n in sorted(counters.items()) if name.startswith("cache.")},
        },
        "pieces": {
            "total": sum(len(trace.piece_uses()) for trace in plan.traces()),
            "unique": len({p.digest for trace in plan.traces() for p in trace.pieces}),
            "segments": plan.segments(),
            "ranges": [[r.low, r.high] for trace in plan.traces() for r in trace.ranges]
            or [[symbol.low, symbol.high] for symbol in plan.symbols],
        },
        "graph_mode": {
            "requested": resolved.requested and resolved.requested.value,
            "resolved": resolved.mode.value,
            "reasons": mode_reasons(resolved),
        },
        **_record_facts(records, (kind for kind in record_kinds() if kind not in of_startup)),
        "memory": [],  # who owns which bytes, where a part knows it
        **_record_facts(records, of_startup),
        "warnings": records.events.warnings(),
        "dispatch": usage.rows(),
        "reasons": usage.reasons(),
        "shadow": None,  # of the part that proves steps
    }


def background_facts(records: Records) -> dict[str, Any] | None:
    """With `bundle="serve"` and no bundle: whether compiled code serves, and what has happened."""
    phases, failures = records.of(BackgroundPhase), records.of(BackgroundFailure)
    if not (phases or failures):
        return None
    switched = records.of(Switched)
    failed = bool(failures)
    return {
        "state": "compiled" if switched else "failed" if failed else "compiling",
        "phases": [phase.facts() for phase in phases],
        "failures": [failure.facts() for failure in failures],
        "switch": switched[0].facts() if switched else None,
        "libraries": [built.facts() for built in records.of(LibrariesBuilt)],
    }


def verified(records: Records) -> bool | str:
    """Whether the bundle was found to be that of the model, or why that is not known."""
    if records.of(Stale):
        return False
    if records.of(Verified):
        return True
    if records.of(NotVerified):
        return records.of(NotVerified)[-1].reason
    bundle = records.compile.bundle
    if bundle is None or not bundle.hit:
        return "the model was traced by this start"
    cache = records.settings.get("cache") or {}
    return "verify_bundle is 'off'" if cache.get("verify_bundle") == "off" else "not yet"


def mode_reasons(resolved: ResolvedMode) -> list[str]:
    """Why the graph mode is not the one that was asked for, in order."""
    return [f"{change.after.value}: {change.why}" for change in resolved.reasons]


def _record_facts(records: Records, kinds: Iterable[type[Record]]) -> dict[str, Any]:
    """What the records of these kinds state, by key; a dotted key is one inside of another."""
    report: dict[str, Any] = {}
    for kind in kinds:
        for key, value in kind.reported(records.of(kind)).items():
            section, _, name = key.rpartition(".")
            (report.setdefault(section, {}) if section else report)[name] = value
    return report


def _stored(cache: Cache) -> dict[str, int]:
    """Entries in the private directory, and the bytes of all blobs."""
    if cache.private is None:
        return {"entries": 0, "bytes": 0}
    root, num_bytes = cache.private.root, 0
    for name in blob_names(root):
        with suppress(FileNotFoundError):  # another process has just removed it
            num_bytes += (root / name).stat().st_size
    return {"entries": len(list(entry_names(root))), "bytes": num_bytes}
