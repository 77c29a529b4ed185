"""A plan of buckets: which steps have none, and the padding on a request trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ...dispatch import Bucket, BucketStrategy, Phase, close_holes, find_holes
from ..engine.buckets import BucketScheduler, shape_of
from ..engine.scheduler import Request, StepSchedule
from .options import RunOptions
from .run import plan_of, scheduled_steps


def plan_facts(options: RunOptions, requests: Sequence[Request]) -> dict[str, Any]:
    """The buckets of `options`, by default exponential, JSON-able.

    For each phase its `buckets`, `holes` and the buckets `missing` to close them; the `steps` that
    serve `requests`, those of them `without` a bucket, and the padding of the others, a share of
    all `rows` and of all blocks of `context`: its `mean`, and the `worst` of a step.
    """
    if options.buckets is None:
        options = replace(options, buckets=BucketStrategy.EXPONENTIAL)
    table, _ = plan_of(options, requests)
    limits = table.limits
    steps: dict[Phase, list[tuple[StepSchedule, Bucket | None]]] = {phase: [] for phase in Phase}
    for schedule in scheduled_steps(BucketScheduler, options, requests):
        shape = shape_of(schedule, limits.block_size)
        steps[shape.phase].append((schedule, table.find(shape)))
    facts = {}
    for phase in Phase:
        planned = sorted(bucket for bucket in table.buckets if bucket.phase is phase)
        holes = find_holes(phase, limits, planned)
        padded = [
            (*_used(schedule, limits.block_size), *_padded(bucket))
            for schedule, bucket in steps[phase]
            if bucket is not None
        ]
        facts[phase.value] = {
            "buckets": planned,
            "holes": holes,
            "missing": sorted(set(close_holes(phase, limits, planned)) - set(planned)),
            "steps": len(steps[phase]),
            "without": len(steps[phase]) - len(padded),
            "rows": _padding([(rows, of) for rows, _, of, _ in padded]),
            "context": _padding([(blocks, of) for _, blocks, _, of in padded]),
        }
    return facts


def _used(schedule: StepSchedule, block_size: int) -> tuple[int, int]:
    """The tokens of a step, and the blocks of context that it reads."""
    lengths = [s.context_len if schedule.is_decode else s.start for s in schedule.shares]
    return schedule.num_tokens, sum(-(-length // block_size) for length in lengths)


def _padded(bucket: Bucket) -> tuple[int, int]:
    decode = bucket.phase is Phase.DECODE
    return bucket.batch * bucket.query, bucket.context * (1 if decode else bucket.batch)


def _padding(steps: Sequence[tuple[int, int]]) -> dict[str, float]:
    padded = sum(of for _, of in steps)
    return {
        "mean": 1 - sum(used for used, _ in steps) / padded if padded else 0.0,
        "worst": max((1 - used / of for used, of in steps if of), default=0.0),
    }


def render(facts: dict[str, Any]) -> str:
    """The plan as text: a grid of requests and lengths for each phase, and its figures."""
    lines: list[str] = []
    for phase, plan in facts.items():
        lines += [f"{phase}: {len(plan['buckets'])} buckets", *_grid(phase, plan["buckets"])]
        if plan["holes"]:
            first, last = map(tuple, plan["holes"][0])
            missing = ", ".join(map(str, map(tuple, plan["missing"])))
            lines += [
                f"  {len(plan['holes'])} ranges without a bucket, such as {first} to {last}",
                f"  closed by {len(plan['missing'])} buckets more: {missing}",
            ]
        else:
            lines += ["  every legal step has a bucket"]
        shares = ", ".join(
            f"{name} {plan[name]['mean']:.1%} (worst step {plan[name]['worst']:.1%})"
            for name in ("rows", "context")
        )
        lines += [
            f"  {plan['steps']} steps of the trace, {plan['without']} without a bucket",
            f"  padding: {shares}",
            "",
        ]
    return "\n".join(lines[:-1])


def _grid(phase: str, buckets: Sequence[Bucket]) -> Iterator[str]:
    """How many buckets have each number of requests and length: of the query, in decode of the
    context."""
    length = "context" if phase == Phase.DECODE else "query"
    cells = Counter((bucket.batch, getattr(bucket, length)) for bucket in buckets)
    columns = sorted({each for _, each in cells})
    yield f"  {'requests':>10} | {length}"
    yield f"  {'':>10} | " + " ".join(f"{column:>5}" for column in columns)
    for batch in sorted({each for each, _ in cells}):
        row = (cells[batch, column] or "." for column in columns)
        yield f"  {batch:>10} | " + " ".join(f"{cell:>5}" for cell in row)
