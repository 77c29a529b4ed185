"""Decisions of dispatch over seeded plans and batches, as lines of text."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from piecegraph.dispatch import (
    Axis,
    Batch,
    Bucket,
    BucketMemory,
    Dispatcher,
    DispatchPlan,
    GraphMode,
    LoraGraphs,
    PaddingLimit,
    RuntimeMode,
    bucket_plan,
    lora_cases,
    make_plan,
)
from piecegraph.errors import PiecegraphError

BATCHES = 250
"""Batches of each plan; 40 plans have 10,000."""

DENSE = (1, 2, 4, *range(8, 129, 8))
SIZES = ((1, 2, 4, 8, 16, 32), (3, 5, 17, 40), (8, 64), DENSE, (1,))
MODES = (*list(GraphMode)[1:], GraphMode.FULL_AND_PIECEWISE, GraphMode.FULL_AND_PIECEWISE)
AXES = (Axis("ubatches", (1, 2)), Axis("chunks", (0, 4, 16), rounds_up=True))
LIMITS = (None, PaddingLimit(factor=1.5), PaddingLimit(tokens=4), PaddingLimit(2.0, 10))
LORA = (
    lora_cases(0),
    lora_cases(4),
    lora_cases(4, LoraGraphs.ONE),
    lora_cases(5, LoraGraphs.BY_COUNT),
)
QUERY_LENS = ((1,), (1,), (4,), (1, 3, 5))


def plans() -> Iterator[tuple[str, DispatchPlan, frozenset[int]]]:
    """40 plans, each with a name and the graphs that are captured: all, or a part."""
    chosen = random.Random(27)
    for number in range(36):
        mode = MODES[number % 6] if number else GraphMode.NONE
        plan = make_plan(
            mode,
            chosen.choice(SIZES),
            max_num_reqs=chosen.choice((4, 16, 64)),
            query_lens=chosen.choice(QUERY_LENS),
            varlen_decode=chosen.random() < 0.2,
            lora_cases=chosen.choice(LORA),
            axes=chosen.choice(((), (), AXES[:1], AXES)),
            padding=chosen.choice(LIMITS),
            mixed_end=chosen.choice((None, None, 16)),
        )
        if number % 7 == 6:
            plan = plan.without_sizes_below(2)
        yield f"{number} {mode}", plan, _captured(plan, chosen)
    for number in range(36, 40):
        shapes = [(1, 8), (2, 8), (4, 16), (8, 1), (16, 1), (32, 1)]
        buckets = [
            Bucket(batch, query, context)
            for batch, query in chosen.sample(shapes, 4)
            for context in chosen.sample((0, 4, 16, 64), 3)
        ]
        plan = bucket_plan(buckets, 32, BucketMemory())
        yield f"{number} buckets", plan, _captured(plan, chosen)


def _captured(plan: DispatchPlan, chosen: random.Random) -> frozenset[int]:
    share = chosen.choice((1.0, 1.0, 0.7, 0.3))
    return frozenset(i for i in range(len(plan.entries)) if chosen.random() < share)


def batches(plan: DispatchPlan, chosen: random.Random) -> Iterator[tuple[Batch, dict[str, Any]]]:
    """Batches of any kind and near the sizes of the plan, some with restricted modes."""
    values = {axis.name: (*axis.values, *axis.values, 3) for axis in plan.axes}
    cases = {entry.descriptor.lora_case for entry in plan.entries}
    loras = (*[0] * 6, *cases, *cases, 1, 6)
    for _ in range(BATCHES):
        size = chosen.randint(1, plan.largest + 2)
        if plan.entries and chosen.random() < 0.5:
            size = max(1, chosen.choice(plan.entries).descriptor.num_tokens - chosen.randint(0, 2))
        query_len = chosen.choice((None, 1, 1, 1, 2, 3, 4, 5))
        is_decode = chosen.random() < 0.6
        num_reqs = chosen.randint(1, min(size, plan.max_num_reqs + 1))
        if query_len is not None:
            num_reqs = min(max(1, size // query_len), plan.max_num_reqs)
            size = num_reqs * query_len
        bound = chosen.choice((None, 4, 8)) if query_len is None else None
        if bound is not None:
            bound = max(bound, -(-size // num_reqs))
        batch = Batch(
            size,
            num_reqs,
            is_decode,
            query_len,
            num_loras=chosen.choice(loras),
            cascade=chosen.random() < 0.1,
            max_query_len=bound,
            axes={name: chosen.choice(some) for name, some in values.items()} or None,
        )
        modes: dict[str, Any] = {}
        if chosen.random() < 0.1:
            modes["allowed_modes"] = chosen.sample(list(RuntimeMode), 2)
        elif chosen.random() < 0.1:
            modes["excluded_modes"] = chosen.sample(list(RuntimeMode), 1)
        yield batch, modes


def decisions(name: str, plan: DispatchPlan, captured: frozenset[int]) -> list[str]:
    """The entries of the plan, then a line for each batch: its facts, and how it runs."""
    lines = [f"{index} {_descriptor(e.mode, e.descriptor)}" for index, e in enumerate(plan.entries)]
    dispatcher = Dispatcher(plan, captured=captured)
    for batch, modes in batches(plan, random.Random(name)):
        text = ", ".join(f"{key}={[m.name for m in value]}" for key, value in modes.items())
        facts = (
            f"{batch.num_tokens} tokens {batch.num_reqs} reqs decode={batch.is_decode}"
            f" query_len={batch.query_len}/{batch.max_query_len} loras={batch.num_loras}"
            f" cascade={batch.cascade} axes={batch.axes} {text}"
        )
        lines.append(f"{facts.strip()} -> {_decision(dispatcher, batch, modes)}")
    return lines


def _decision(dispatcher: Dispatcher, batch: Batch, modes: dict[str, Any]) -> str:
    try:
        decision = dispatcher.dispatch(batch, **modes)
    except PiecegraphError as error:
        return type(error).__name__
    missed = "" if decision.missed is None else f" missed: {decision.missed.value}"
    what = _descriptor(decision.mode, decision.descriptor)
    return f"{what} graph {decision.graph_index} ({decision.reason.value}{missed})"


def _descriptor(mode: RuntimeMode, key: Any) -> str:
    lengths = f"{key.uniform_query_len}/{key.max_query_len}"
    where = f"lora_case={key.lora_case} axes={dict(key.axes)}"
    return f"{mode.name} {key.num_tokens} tokens {key.num_reqs} reqs query_len={lengths} {where}"
