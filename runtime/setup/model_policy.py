"""The dispatch policy for the code of a model: its smallest size, and what padding would mix."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from ...compile.ir.config import TOKENS
from ...compile.plan.compiled_model import CompiledModel
from ...config import Config, named_ops, without_tokens
from ...dispatch import (
    Dispatcher,
    DispatchPlan,
    GraphMode,
    PaddingLimit,
    Phase,
    ResolvedMode,
    close_holes,
    find_holes,
)
from ..capture.breaks import recordable
from ..capture.dummy_batch import preserve_rng_state
from ..core.padding import padding_policy
from ..core.records import BucketHole, BucketsMissing, Records, RowsMixed
from ..parts.proof.row_mixing import find_mixed_rows
from .policy import Policy, dispatch_plan

NO_PADDING = PaddingLimit(tokens=0)


def model_policy(
    config: Config,
    plan: DispatchPlan,
    resolved: ResolvedMode,
    device: torch.device,
    records: Records,
    owned: Collection[str],
    compiled: CompiledModel,
) -> Policy:
    """The dispatch policy for compiled code: `plan` without sizes that the code cannot run or must
    not pad to. `owned` are inputs that the engine writes itself."""
    lows = [symbol.low for symbol in compiled.plan.symbols if symbol.label == TOKENS]
    if not lows:
        raise without_tokens(config.inputs)
    ends = tuple(trace.plan.ranges[-1].high for trace in compiled.traces()[:-1])
    plan = replace(plan.without_sizes_below(lows[0]), ends=ends)
    pads = config.sizes.padding_limit != NO_PADDING
    if plan.entries and pads and _mixes_rows(compiled, config, device, records):
        unpadded = dispatch_plan(resolved.mode, config.changed(sizes={"padding_limit": NO_PADDING}))
        plan = replace(unpadded.without_sizes_below(lows[0]), ends=ends)
    for size in _padded_whole(compiled, config, owned) if plan.entries else ():
        if _mixes_rows(compiled, config, device, records, size):
            plan = dispatch_plan(GraphMode.NONE, config)  # no graph has the size of a step
            break
    return Policy(resolved, Dispatcher(plan))


def find_bucket_holes(config: Config, records: Records) -> None:
    """Prove that every legal step has a bucket, or record those that have none."""
    sizes = config.sizes
    if sizes.bucket_limits is None:
        return
    for phase in Phase:
        buckets = [bucket for bucket in sizes.buckets if bucket.phase is phase]
        holes = find_holes(phase, sizes.bucket_limits, buckets)
        closed = close_holes(phase, sizes.bucket_limits, buckets) if holes else ()
        for hole in holes:
            records.add(BucketHole(phase.value, tuple(hole.first), tuple(hole.last)))
        if closed:
            missing = sorted(set(closed) - set(buckets))
            records.add(BucketsMissing(phase.value, [tuple(bucket) for bucket in missing]))


def _mixes_rows(
    compiled: CompiledModel,
    config: Config,
    device: torch.device,
    records: Records,
    size: str = TOKENS,
) -> bool:
    """Whether padding of `size` would change real rows."""
    labels = [item.label for item in compiled.plan.inputs]
    policies = {label: padding_policy(config.steps, label) for label in labels}
    sentinels = {label: policy.value for label, policy in policies.items() if policy.is_sentinel}
    with preserve_rng_state(), torch.no_grad():
        ops = named_ops(config.splitting_ops)
        forward = None if compiled.traced else recordable(compiled, ops)
        pieces = [
            mixed
            for trace in compiled.traces()
            for mixed in find_mixed_rows(
                trace, device, size=size, sentinels=sentinels, forward=forward
            )
        ]
    for mixed in pieces:
        records.add(RowsMixed(mixed.piece, mixed.result, mixed.where, mixed.size))
    return bool(pieces)


def _padded_whole(compiled: CompiledModel, config: Config, owned: Collection[str]) -> list[str]:
    """The sizes beside the tokens that every graph has at their largest, and that the library pads:
    no axis states them, and the engine does not write their inputs itself."""
    plan = compiled.plan
    sizes = {symbol.label: symbol.name for symbol in plan.symbols if symbol.label != TOKENS}
    for axis in config.variants.axes:
        if not axis.rounds_up:
            sizes.pop(axis.name, None)
    written = [item for item in plan.inputs if item.label not in owned]
    return [n for n, symbol in sizes.items() if any(symbol in item.shape for item in written)]
