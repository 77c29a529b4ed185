"""The dispatch plan: the graphs to capture, in the order of their indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import product
from typing import Any

from ..errors import BatchInvalid, InvalidSetting, PlanInvalid
from .batch import Batch, BatchDescriptor
from .buckets.bucket import Bucket, BucketMemory, BucketOrder, Phase, order_key
from .modes import GraphMode, LoraGraphs, RuntimeMode


@dataclass(frozen=True, slots=True)
class Axis:
    """An extra dimension of the key, defined by the engine, with the values to capture for.

    A batch uses the graph captured for its value; with `rounds_up`, also one of a larger value.
    """

    name: str
    values: tuple[int, ...]
    rounds_up: bool = False


@dataclass(frozen=True, slots=True)
class PaddingLimit:
    """The most padding a graph may add: padded tokens over real ones, and padding tokens."""

    factor: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("factor", self.factor, 1), ("tokens", self.tokens, 0)):
            if value is not None and value < least:
                raise InvalidSetting(
                    name=f"padding_limit.{name}",
                    value=value,
                    reason="even an exact fit would exceed it",
                    expected=f"{least} or more",
                )

    def least_tokens(self, size: int) -> int:
        """The fewest real tokens for which a graph of `size` is within the limit."""
        least = 1
        if self.tokens is not None:
            least = max(least, size - self.tokens)
        if self.factor is not None:
            least = max(least, int(size / self.factor))
            while size > self.factor * least:
                least += 1
        return least


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """One graph to capture; its place in the plan is its graph_index."""

    mode: RuntimeMode
    descriptor: BatchDescriptor

    @property
    def shape(self) -> str:
        """Mode and size, as `FULL 16`; with axes also these, as `FULL 16: num_reqs 2, query 8`."""
        axes = self.descriptor.axes
        stated = ", ".join(f"{k} {v}" for k, v in (("num_reqs", self.descriptor.num_reqs), *axes))
        size = f"{self.mode.name} {self.descriptor.num_tokens}"
        return f"{size}: {stated}" if axes else size

    def as_json(self) -> dict[str, Any]:
        return {"mode": self.mode.name, **self.descriptor.as_json()}


@dataclass(frozen=True, slots=True)
class CapturePhase:
    """Graphs that have a `share` of the memory for graphs, by index in capture order."""

    name: str
    share: float
    order: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Everything that dispatch depends on: ranks with equal digests make equal decisions.

    Entries are in capture order: PIECEWISE before FULL, the largest first. Under a memory limit
    graphs are captured in the order of `phases`, if there are any. Raises PlanInvalid for
    a duplicate entry, an entry of mode NONE or of size 0, and an entry whose axes are not exactly
    the plan's.
    """

    entries: tuple[PlanEntry, ...]
    max_num_reqs: int
    axes: tuple[Axis, ...] = ()
    padding: PaddingLimit = PaddingLimit()
    min_num_tokens: int = 1
    """Smaller batches are padded to this size, also without a graph."""
    ends: tuple[int, ...] = ()
    """Sizes beyond which no batch is padded: the model computes in another way above them."""
    phases: tuple[CapturePhase, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise PlanInvalid(fault=f"an axis of {names} is duplicated")
        seen: set[PlanEntry] = set()
        for entry in self.entries:
            if entry.mode is RuntimeMode.NONE or entry.descriptor.num_tokens < 1:
                raise PlanInvalid(fault=f"{entry} is not a graph")
            if [name for name, _ in entry.descriptor.axes] != names:
                raise PlanInvalid(fault=f"{entry} does not have the axes {names}")
            if entry in seen:
                raise PlanInvalid(fault=f"{entry} is duplicated")
            seen.add(entry)

    @property
    def largest(self) -> int:
        """The largest size in tokens, 0 without entries."""
        return max((entry.descriptor.num_tokens for entry in self.entries), default=0)

    @property
    def digest(self) -> str:
        """sha256 of the plan as canonical JSON; ranks compare it to make sure that they agree."""
        import hashlib
        import json

        text = json.dumps(self.as_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {
            "entries": [entry.as_json() for entry in self.entries],
            "max_num_reqs": self.max_num_reqs,
            "axes": [[axis.name, list(axis.values), axis.rounds_up] for axis in self.axes],
            "padding": [self.padding.factor, self.padding.tokens],
            **({"min_num_tokens": self.min_num_tokens} if self.min_num_tokens > 1 else {}),
            **({"ends": list(self.ends)} if self.ends else {}),
            **({"phases": [astuple(phase) for phase in self.phases]} if self.phases else {}),
        }

    def least_tokens(self, size: int) -> int:
        """The fewest real tokens that are padded to `size`."""
        return max([self.padding.least_tokens(size), *(end + 1 for end in self.ends if end < size)])

    def without_sizes_below(self, min_num_tokens: int) -> DispatchPlan:
        """The plan for a model that takes at least `min_num_tokens`; smaller batches are padded."""
        fit = [i for i, e in enumerate(self.entries) if e.descriptor.num_tokens >= min_num_tokens]
        index = {old: new for new, old in enumerate(fit)}
        phases = tuple(
            replace(phase, order=tuple(index[i] for i in phase.order if i in index))
            for phase in self.phases
        )
        entries = tuple(self.entries[i] for i in fit)
        return replace(self, entries=entries, min_num_tokens=min_num_tokens, phases=phases)


def axis_values(axes: Sequence[Axis], batch: Batch) -> tuple[tuple[str, int], ...]:
    """The batch's axis values in the plan's order; raises BatchInvalid unless the names agree."""
    values = batch.axes or {}
    names = [axis.name for axis in axes]
    if values.keys() != set(names):
        raise BatchInvalid(batch=batch, fault=f"the axes of the plan are {names}")
    return tuple((name, values[name]) for name in names)


def make_plan(
    mode: GraphMode,
    sizes: Sequence[int],
    *,
    max_num_reqs: int,
    query_lens: Sequence[int] = (1,),
    varlen_decode: bool = False,
    lora_cases: Sequence[int] = (0,),
    axes: Sequence[Axis] = (),
    padding: PaddingLimit | None = None,
    mixed_end: int | None = None,
) -> DispatchPlan:
    """The plan of a resolved `mode` over capture `sizes` (see `default_capture_sizes`).

    `query_lens` are the query lengths of uniform decode; with `varlen_decode` decode batches are
    keyed by the longest of them as a bound. `lora_cases` come from the function of that name.
    Where decode has its own graphs, sizes above `mixed_end` have no graph for mixed batches.
    """
    names = [axis.name for axis in axes]
    entries = {
        replace(
            entry,
            descriptor=replace(
                entry.descriptor,
                lora_case=lora_case,
                axes=tuple(zip(names, values, strict=True)),
            ),
        ): None
        for entry in _entries(mode, sizes, max_num_reqs, query_lens, varlen_decode, mixed_end)
        for lora_case, *values in product(lora_cases, *(axis.values for axis in axes))
    }
    ordered = sorted(entries, key=lambda entry: (entry.mode, -entry.descriptor.num_tokens))
    limit = padding or PaddingLimit()
    return DispatchPlan(tuple(ordered), max_num_reqs, tuple(axes), limit)


def bucket_plan(buckets: Iterable[Bucket], max_num_reqs: int, memory: BucketMemory) -> DispatchPlan:
    """The plan with a FULL graph for each bucket, largest first, in rows and then in context.

    A step that an engine has padded to a bucket states its rows, its requests, and the axes `query`
    and `context`. `memory` gives the phases.
    """
    ordered = sorted(set(buckets), key=lambda b: (-b.batch * b.query, -b.context, b))
    entries = (
        PlanEntry(
            RuntimeMode.FULL,
            BatchDescriptor(
                bucket.batch * bucket.query,
                bucket.batch,
                axes=(("query", bucket.query), ("context", bucket.context)),
            ),
        )
        for bucket in ordered
    )
    axes = (
        Axis("query", tuple(sorted({bucket.query for bucket in ordered}))),
        Axis("context", tuple(sorted({bucket.context for bucket in ordered}))),
    )

    def phase(name: Phase, share: float, order: BucketOrder) -> CapturePhase:
        indices = (i for i, bucket in enumerate(ordered) if bucket.phase is name)
        return CapturePhase(
            name, share, tuple(sorted(indices, key=lambda i: order_key(order, ordered[i])))
        )

    phases = (
        phase(Phase.PROMPT, memory.prompt_share, memory.prompt_order),
        phase(Phase.DECODE, 1 - memory.prompt_share, memory.decode_order),
    )
    return DispatchPlan(tuple(entries), max_num_reqs, axes, phases=phases)


def lora_cases(max_loras: int, graphs: LoraGraphs = LoraGraphs.WITH_AND_WITHOUT) -> tuple[int, ...]:
    """The adapter counts to capture for, ascending; (0,) without LoRA.

    `max_loras + 1` fits every batch: all adapters and the base model. Case 0 is a graph without
    adapter kernels; BY_COUNT adds the powers of two up to `max_loras`. A batch uses the smallest
    case that is large enough, so omitting a case costs time but no batch loses its graph.
    """
    if max_loras == 0:
        return (0,)
    none = () if graphs is LoraGraphs.ONE else (0,)
    count = max_loras.bit_length() if graphs is LoraGraphs.BY_COUNT else 0
    return (*none, *(1 << bit for bit in range(count)), max_loras + 1)


def _entries(
    mode: GraphMode,
    sizes: Sequence[int],
    max_num_reqs: int,
    query_lens: Sequence[int],
    varlen_decode: bool,
    mixed_end: int | None,
) -> Iterator[PlanEntry]:
    """The graphs of each size: one for mixed batches, one for each query length of decode.

    A FULL graph contains attention, so its key has the number of requests and, for decode, the
    query length. A PIECEWISE graph runs attention outside, so its key has only the tokens.
    """
    for size in sizes:
        decode_only = mode.separate_decode and mixed_end is not None and size > mixed_end
        num_reqs = min(size, max_num_reqs)
        if mode.mixed is not RuntimeMode.NONE and not decode_only:
            full = mode.mixed is RuntimeMode.FULL
            yield PlanEntry(mode.mixed, BatchDescriptor(size, num_reqs if full else None))
        if not mode.separate_decode:
            continue
        if varlen_decode:
            bound = max(query_lens)
            if size <= bound * max_num_reqs:
                key = BatchDescriptor(size, num_reqs, max_query_len=bound)
                yield PlanEntry(mode.decode, key)
            continue
        for query_len in query_lens:
            num_reqs = -(-size // query_len)
            rounded = num_reqs * query_len
            if rounded <= min(max(sizes), query_len * max_num_reqs):
                key = BatchDescriptor(rounded, num_reqs, uniform_query_len=query_len)
                yield PlanEntry(mode.decode, key)
