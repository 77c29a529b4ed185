"""The dispatch policy for the code of a model: its smallest size, and what padding would mix."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch

from ...compile.ir.config import TOKENS
from ...compile.plan.compiled_model import CompiledModel
from ...config import Config, dispatch_plan, named_ops, without_tokens
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
from ..core.padding import padding_policy
from ..core.records import BucketHole, BucketsMissing, Records, RowsMixed

NO_PADDING = PaddingLimit(tokens=0)


FindMixedRows = Callable[..., Iterable[RowsMixed | str]]
"""`parts.proof.row_mixing.find_mixed_rows`."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are dispatched: the graph mode, with the reasons for it, and the dispatcher."""

    resolved: ResolvedMode
    dispatcher: Dispatcher


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """Gives the dispatch policy for compiled code: without sizes that the code cannot run or must
    not pad to.

    `owned` are inputs that the engine writes itself. Without `find_mixed_rows` padding is trusted.
    """

    config: Config
    resolved: ResolvedMode
    device: torch.device
    records: Records
    owned: Collection[str]
    find_mixed_rows: FindMixedRows | None

    def __call__(self, compiled: CompiledModel) -> Policy:
        config, mode, forms = self.config, self.resolved.mode, compiled.forms()
        lows = [s.low for form in forms for s in form.plan.symbols if s.label == TOKENS]
        if len(lows) < len(forms):
            raise without_tokens(config.inputs)
        ends = sorted({t.plan.ranges[-1].high for form in forms for t in form.traces()[:-1]})
        plan = replace(dispatch_plan(mode, config).without_sizes_below(lows[0]), ends=tuple(ends))
        pads = config.sizes.padding_limit != NO_PADDING
        looked_at = forms if plan.entries and pads else []
        mixed = [each for form in looked_at for each in self._mixed_rows(form, plan)]
        if any(each.end is None for each in mixed):
            unpadded = dispatch_plan(mode, config.changed(sizes={"padding_limit": NO_PADDING}))
            plan = replace(unpadded.without_sizes_below(lows[0]), ends=tuple(ends))
        elif mixed:
            plan = replace(plan, ends=tuple(sorted({*ends, *(each.end or 0 for each in mixed)})))
        for form in forms if plan.entries else ():
            sizes = _padded_whole(form, config, self.owned)
            if any(self._mixed_rows(form, plan, size) for size in sizes):
                plan = dispatch_plan(GraphMode.NONE, config)  # no graph has the size of a step
                break
        return Policy(self.resolved, Dispatcher(plan))

    def _mixed_rows(
        self, compiled: CompiledModel, plan: DispatchPlan, size: str = TOKENS
    ) -> list[RowsMixed]:
        """Where padding of `size` would change real rows or state."""
        if self.find_mixed_rows is None:
            return []
        steps, inputs = self.config.steps, compiled.plan.inputs
        padding = {item.label: padding_policy(steps, item) for item in inputs}
        with torch.no_grad():
            ops = named_ops(self.config.splitting_ops)
            split = compiled.traced and not compiled.plan.cuts()
            found = [
                record
                for trace in compiled.traces()
                for record in self.find_mixed_rows(
                    trace, self.device, size=size,
                    captured={entry.descriptor.num_tokens for entry in plan.entries},
                    sentinels={n: each.value for n, each in padding.items() if each.is_sentinel},
                    max_num_reqs=self.config.max_num_reqs,
                    forward=None if split else recordable(compiled, ops),
                )
            ]  # fmt: skip
        for reason in found:
            if isinstance(reason, str):
                self.records.events.emit("rows_unchecked", level=logging.INFO, reason=reason)
        mixed = [record for record in found if isinstance(record, RowsMixed)]
        for record in mixed:
            self.records.add(record)
        return mixed


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
