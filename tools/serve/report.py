"""The main job's report as data; docs/metrics-and-report.md documents every key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..engine.decoder_config import DecoderConfig
from ..engine.scheduler import Request
from ..engine.serving_log import ServingLog
from ..report.origin import origin
from ..report.output import Output
from ..report.sections import ReportSection, Table, columns, size
from .options import RunOptions
from .verify import VerificationResult

SCHEMA = 2

Report = dict[str, Any]


def build_report(
    *,
    options: RunOptions,
    prepared: Report,
    phases: Sequence[tuple[str, float]],
    requests: Sequence[Request],
    log: ServingLog,
    verification: VerificationResult,
    speculation: Report | None = None,
    swaps: Sequence[int] | None = None,
    generated: Any = None,
) -> Report:
    """Combine the library's report (`prepared`) with the engine's measurements.

    `phases` are the main job's own, in seconds, before the library's.
    """
    startup = dict(prepared["startup"])
    before = startup.get("before_prepare_seconds")
    if before is not None:  # what came before the first of them: Python itself, other imports
        phases = [("process", before - sum(seconds for _, seconds in phases)), *phases]
    startup["phases"] = [{"name": n, "seconds": s} for n, s in phases] + startup["phases"]
    startup["first_token_seconds"] = log.first_token_at
    startup["first_answer_seconds"] = log.first_answer_at
    arrivals = {request.id: request.arrival for request in requests}
    return {
        "schema": SCHEMA,
        **origin(),
        "options": _options(options),
        **prepared,
        "startup": startup,
        "lora": _lora(options, prepared["dispatch"]),
        "speculation": speculation,
        "defragmentation": None if swaps is None else {"swaps": len(swaps), "blocks": sum(swaps)},
        "serving": _serving(requests, log),
        "latency": {
            **token_latencies(arrivals, log.token_times),
            "step": summarize([step.seconds for step in log.steps]),
        },
        "verification": _verification(verification, generated),
    }


def _serving(requests: Sequence[Request], log: ServingLog) -> Report:
    seconds = sum(step.seconds for step in log.steps)
    generated = sum(len(times) for times in log.token_times.values())
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.num_prompt for request in requests),
        "generated_tokens": generated,
        "steps": len(log.steps),
        "preemptions": sum(step.num_preempted for step in log.steps),
        "seconds": seconds,
        "generated_tokens_per_second": generated / seconds,
        "requests_per_second": len(requests) / seconds,
    }


def _lora(options: RunOptions, dispatch: Sequence[Report]) -> Report | None:
    """How many steps each LoRA case's graphs served."""
    if not options.lora:
        return None
    used: Counter[int] = Counter()
    for row in dispatch:
        if "descriptor" in row:
            used[row["descriptor"]["lora_case"]] += row["count"]
    cases = [{"case": case, "steps": steps} for case, steps in sorted(used.items())]
    return {"adapters": options.lora, "cases_used": cases}


def _verification(verification: VerificationResult, generated: Any) -> Report:
    return {
        "ok": verification.ok and (generated is None or generated.difference is None),
        "steps": verification.steps,
        "not_compared": verification.not_compared,
        "max_abs_diff": verification.max_abs_diff,
        "mismatch": verification.mismatch and verification.mismatch.as_json(),
        "generate": generated and asdict(generated),
    }


def _options(options: RunOptions) -> Report:
    """Options as JSON: enums by name, paths as text."""
    plain: Report = {}
    for each in fields(options):
        value = getattr(options, each.name)
        if isinstance(value, Enum):
            value = value.name
        elif isinstance(value, Path | Output):
            value = str(value)
        if each.name == "hf":
            value = value and value.text
        plain[each.name] = asdict(value) if isinstance(value, DecoderConfig) else value
    return plain


PERCENTILES = {"median": 50, "p90": 90, "p99": 99}

Summary = dict[str, float | None]


def summarize(seconds: Sequence[float]) -> Summary:
    """Count, mean and percentiles by linear interpolation; None where nothing was measured."""
    if not seconds:
        return {"count": 0, "mean": None, **dict.fromkeys(PERCENTILES)}
    values = np.percentile(seconds, list(PERCENTILES.values()))
    percentiles = dict(zip(PERCENTILES, map(float, values), strict=True))
    return {"count": len(seconds), "mean": float(np.mean(seconds)), **percentiles}


def token_latencies(
    arrivals: Mapping[int, float], token_times: Mapping[int, Sequence[float]]
) -> dict[str, Summary]:
    """Time from a request's arrival to its first token, and from each token to the next."""
    first = [times[0] - arrivals[request] for request, times in token_times.items()]
    return {
        "time_to_first_token": summarize(first),
        "inter_token": summarize(between_tokens(token_times)),
    }


def between_tokens(token_times: Mapping[int, Sequence[float]]) -> list[float]:
    """Seconds from each token of a request to its next."""
    return [later - earlier for times in token_times.values() for earlier, later in pairwise(times)]


def run_sections(report: Report) -> list[ReportSection]:
    """The report in sections, for people."""
    verification = report["verification"]
    style = "green" if verification["ok"] else "bold red"
    captures = [
        (c["mode"], c["num_tokens"], f"{c['ms']:.2f}", size(c["bytes"])) for c in report["captures"]
    ]
    latencies = [
        (name.replace("_", " "), *(_ms(summary[each]) for each in PERCENTILES))
        for name, summary in report["latency"].items()
    ]
    return [
        _startup_section(report["startup"]),
        ReportSection("", [Table(list(_facts(report).items()))]),
        ReportSection(
            "Captures",
            [Table(captures, columns("mode", "tokens", "ms", "memory"))],
        ),
        _dispatch_section(report["dispatch"]),
        ReportSection("Latency, ms", [Table(latencies, columns("", *PERCENTILES))]),
        ReportSection("Serving", notes=[_served(report["serving"])]),
        ReportSection(
            "Verification",
            notes=[_verdict(verification), *shadow_lines(report["shadow"])],
            style=style if verification["steps"] else "yellow",
        ),
    ]


def _startup_section(startup: Report) -> ReportSection:
    """One line for each phase; phases of the same name share a line.

    The total of `prepare` follows its phases; captures and warm-up come after it.
    """
    times: dict[str, list[float]] = {}
    for phase in startup["phases"]:
        times.setdefault(phase["name"], []).append(phase["seconds"])
    later = {n: times.pop(n) for n in list(times) if n == "capture" or n.startswith("warmup.")}
    times |= {"prepare in all": [startup["prepare_seconds"]], **later}
    rows = [(name, len(spent), f"{sum(spent):.3f}") for name, spent in times.items()]
    return ReportSection("Startup", [Table(rows, columns("phase", "times", "seconds"))])


def _facts(report: Report) -> dict[str, str]:
    cache, pieces, mode = report["cache"], report["pieces"], report["graph_mode"]
    counters = report["counters"]
    outcome = "hit" if cache["hit"] else "miss"
    why = f": {cache['reason']}" if cache.get("reason") else ""
    ranges = ", ".join(f"{low} to {high}" for low, high in pieces["ranges"]) or "none"
    traced_again = cache["hit"] and cache["verified"] is True and counters["dynamo_traces"]
    verifying = ", to verify the bundle" if traced_again else ""
    facts = {
        "cache": f"{outcome}{why} ({cache['entries']} entries, {size(cache['bytes'])})",
        "compiled": f"{counters['dynamo_traces']} Dynamo traces{verifying},"
        f" {counters['inductor_compiles']} Inductor compiles",
        "pieces": f"{pieces['total']}, {pieces['unique']} of them unique,"
        f" in {pieces['segments']} segments; tokens {ranges}",
        "graph mode": f"{mode['resolved']} ({mode['requested'] or 'no mode'} was asked for)",
    }
    token, answer = (report["startup"][f"first_{what}_seconds"] for what in ("token", "answer"))
    if answer is not None:
        facts["first token"] = f"{token:.2f} s after the start of the process"
        facts["first answer"] = f"{answer:.2f} s after it, verification included"
    if (background := report["background"]) is not None:
        facts["compiled behind"] = _background(background)
    if cache["not_cacheable"]:
        facts["not cacheable"] = "\n".join(cache["not_cacheable"])
    if report["options"]["buckets"]:
        missing = sum(len(each["buckets"]) for each in report["buckets"]["missing"])
        holes = len(report["buckets"]["holes"])
        facts["buckets"] = f"{holes} holes" + (f", closed by {missing} buckets" if holes else "")
        if fallbacks := report["buckets"]["fallbacks"]:
            needed = ", ".join(sorted({each["missing"] for each in fallbacks}))
            steps = sum(each["steps"] for each in fallbacks)
            facts["without a bucket"] = f"{steps} steps, for want of {needed}"
    if lora := report["lora"]:
        used = ", ".join(f"{each['case']}: {each['steps']} steps" for each in lora["cases_used"])
        facts["LoRA cases"] = used or "none used"
    if speculation := report["speculation"]:
        saved = speculation["steps_saved"]
        facts["speculation"] = (
            f"{speculation['accepted']} of {speculation['proposed']} drafts accepted"
            + ("" if saved is None else f", {saved} steps saved")
        )
    if (moved := report["defragmentation"]) is not None:
        facts["defragmentation"] = f"{moved['blocks']} blocks moved in {moved['swaps']} swaps"
    sizes = report["sizes"]
    if sizes is not None and (fit := sizes["suggested"]) is not None:
        facts["better sizes"] = (
            f"padding {fit['padding']:.1%} instead of {sizes['padding']:.1%}, and"
            f" {fit['steps_above']} instead of {sizes['steps_above']} steps above every size, with"
            f" --capture-sizes {','.join(map(str, fit['sizes']))}"
        )
    return facts | ({"why": "; ".join(mode["reasons"])} if mode["reasons"] else {})


def _background(background: Report) -> str:
    """How a model that was served uncompiled was compiled."""
    switch, failures = background["switch"], background["failures"]
    if switch is not None:
        return f"served after {switch['seconds']:.1f} s and {switch['steps']} steps"
    if background["state"] == "failed":
        return f"failed, the model is served uncompiled: {failures[-1]['reason']}"
    return f"not yet: {background['phases'][-1]['phase']}" if background["phases"] else "not yet"


def _dispatch_section(dispatch: Sequence[Report]) -> ReportSection:
    """Steps by mode and padded size; steps without a graph share a line for all their sizes."""
    graphs = [entry for entry in dispatch if entry["mode"] != "NONE"]
    without = [entry for entry in dispatch if entry["mode"] == "NONE"]
    rows = [_dispatch_row(entry["mode"], str(entry["num_tokens"]), [entry]) for entry in graphs]
    if without:
        tokens = [entry["num_tokens"] for entry in without]
        rows.append(_dispatch_row("NONE", f"{min(tokens)} to {max(tokens)}", without))
    rows.append(_dispatch_row("all", "", dispatch))
    return ReportSection(
        "Dispatch", [Table(rows, columns("mode", "tokens", "steps", "padding rows"))]
    )


def _dispatch_row(mode: str, tokens: str, entries: Sequence[Report]) -> tuple[str, ...]:
    steps = sum(entry["count"] for entry in entries)
    rows = sum(entry["count"] * entry["num_tokens"] for entry in entries)
    padding = sum(entry["padded_tokens"] for entry in entries)
    return mode, tokens, str(steps), f"{padding / rows:.1%}" if rows else "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000:.2f}"


def _served(serving: Report) -> str:
    return (
        f"served {serving['requests']} requests ({serving['prompt_tokens']} prompt tokens,"
        f" {serving['generated_tokens']} generated) in {serving['steps']} steps"
        f" and {serving['seconds']:.2f} s: {serving['generated_tokens_per_second']:.0f} tokens/s,"
        f" {serving['requests_per_second']:.1f} requests/s,"
        f" {serving['preemptions']} preemptions"
    )


def shadow_lines(shadow: Report | None) -> list[str]:
    """What was proved while serving, and each wrong step."""
    if shadow is None:
        return []
    proved = sum(row["count"] for row in shadow["proved"])
    lines = [f"steps proved while serving: {proved}, in {shadow['share']:.1%} of the time"]
    if shadow["stopped"]:
        lines.append(f"stopped proving: {shadow['stopped']}")
    return lines + [
        f"WRONG step of {wrong['num_tokens']} tokens ({wrong['mode']}): out of service:"
        f" {wrong['out_of_service']}; saved in {wrong['file']}"
        + (f"; {wrong['changed']}" if wrong["changed"] else "")
        for wrong in shadow["wrong"]
    ]


def _verdict(verification: Report) -> str:
    generate = verification["generate"]
    if generate is not None and generate["difference"]:
        return f"verification FAILED against generate: {generate['difference']}"
    if not verification["ok"]:
        mismatch = verification["mismatch"]
        return (
            f"verification FAILED at step {mismatch['step']} ({mismatch['mode']},"
            f" descriptor {mismatch['descriptor']}): {mismatch['what']}"
        )
    if not verification["steps"]:
        return "not verified"
    unknown = verification["not_compared"]
    return (
        f"verified {verification['steps'] - unknown} steps against the eager model:"
        f" largest difference {verification['max_abs_diff']:.2g}"
        + (f"; {unknown} not, since rounding alone changes all of a row" if unknown else "")
    ) + (
        f"; {generate['tokens']} tokens of {generate['requests']} requests are those of generate"
        if generate is not None
        else ""
    )
