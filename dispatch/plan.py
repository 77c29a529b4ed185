"""The dispatch plan: the graphs to capture, in the order of their indices."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from ..errors import BatchInvalid, InvalidSetting, PlanInvalid
from .batch import Batch, BatchDescriptor
from .buckets.bucket import Bucket
from .modes import GraphMode, RuntimeMode


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

    def as_json(self) -> dict[str, Any]:
        return {"mode": self.mode.name, **self.descriptor.as_json()}


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """Everything that dispatch depends on: ranks with equal digests make equal decisions.

    Entries are in capture order: PIECEWISE before FULL, the largest first. Raises PlanInvalid for
    a duplicate entry, an entry of mode NONE or of size 0, and an entry whose axes are not exactly
    the plan's.
    """

    entries: tuple[PlanEntry, ...]
    max_num_reqs: int
    axes: tuple[Axis, ...] = ()
    padding: PaddingLimit = PaddingLimit()
    min_num_tokens: int = 1
    """Smaller batches are padded to this size, also without a graph."""

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
        }

    def without_sizes_below(self, min_num_tokens: int) -> DispatchPlan:
        """The plan for a model that takes at least `min_num_tokens`; smaller batches are padded."""
        fit = [e for e in self.entries if e.descriptor.num_tokens >= min_num_tokens]
        return replace(self, entries=tuple(fit), min_num_tokens=min_num_tokens)


def describe(
    mode: RuntimeMode,
    num_tokens: int,
    *,
    max_num_reqs: int,
    query_len: int | None = None,
    max_query_len: int | None = None,
    lora_case: int = 0,
    axes: tuple[tuple[str, int], ...] = (),
) -> BatchDescriptor:
    """Make a dispatch key; all keys are made here.

    A FULL graph contains attention, so its key has the number of requests and, for decode, the
    query length. A PIECEWISE graph runs attention outside, so its key has only the tokens.
    """
    if mode is not RuntimeMode.FULL:
        return BatchDescriptor(num_tokens, lora_case=lora_case, axes=axes)
    if query_len is not None:
        num_reqs = num_tokens // query_len
        return BatchDescriptor(num_tokens, num_reqs, query_len, None, lora_case, axes)
    num_reqs = min(num_tokens, max_num_reqs)
    return BatchDescriptor(num_tokens, num_reqs, None, max_query_len, lora_case, axes)


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
    Raises InvalidSetting for a query length below 1.
    """
    if min(query_lens, default=0) < 1:
        raise InvalidSetting(
            name="query_lens",
            value=query_lens,
            reason="a decode request has at least one token",
            expected="lengths of 1 or more",
        )
    names = [axis.name for axis in axes]
    entries = {
        PlanEntry(
            shape.mode,
            describe(
                shape.mode,
                shape.num_tokens,
                max_num_reqs=max_num_reqs,
                query_len=shape.query_len,
                max_query_len=shape.max_query_len,
                lora_case=lora_case,
                axes=tuple(zip(names, values, strict=True)),
            ),
        ): None
        for shape in _shapes(mode, sizes, max_num_reqs, query_lens, varlen_decode, mixed_end)
        for lora_case, *values in product(lora_cases, *(axis.values for axis in axes))
    }
    ordered = sorted(entries, key=lambda entry: (entry.mode, -entry.descriptor.num_tokens))
    limit = padding or PaddingLimit()
    return DispatchPlan(tuple(ordered), max_num_reqs, tuple(axes), limit)


def bucket_plan(buckets: Iterable[Bucket], max_num_reqs: int) -> DispatchPlan:
    """The plan with a FULL graph for each bucket, largest first.

    A step that an engine has padded to a bucket states its rows, its requests, and the axes `query`
    and `context`.
    """
    ordered = sorted(set(buckets), key=lambda bucket: (-bucket.batch * bucket.query, bucket))
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
    return DispatchPlan(tuple(entries), max_num_reqs, axes)


def lora_cases(
    max_loras: int, *, specialize: bool = True, specialize_counts: bool = False
) -> tuple[int, ...]:
    """The adapter counts to capture for, ascending; (0,) without LoRA.

    `max_loras + 1` fits every batch: all adapters and the base model. `specialize` adds case 0, a
    graph without adapter kernels; `specialize_counts` adds the powers of two up to `max_loras`. A
    batch uses the smallest case that is large enough, so omitting a case costs time but no batch
    loses its graph. Raises InvalidSetting for a negative `max_loras`.
    """
    if max_loras < 0:
        raise InvalidSetting(
            name="max_loras", value=max_loras, reason="it is negative", expected="0 or more"
        )
    if max_loras == 0:
        return (0,)
    none = (0,) if specialize else ()
    powers = tuple(1 << bit for bit in range(max_loras.bit_length())) if specialize_counts else ()
    return (*none, *powers, max_loras + 1)


class _Shape(NamedTuple):
    mode: RuntimeMode
    num_tokens: int
    query_len: int | None = None
    max_query_len: int | None = None


def _shapes(
    mode: GraphMode,
    sizes: Sequence[int],
    max_num_reqs: int,
    query_lens: Sequence[int],
    varlen_decode: bool,
    mixed_end: int | None,
) -> Iterator[_Shape]:
    """The graphs of each size: one for mixed batches, one for each query length of decode."""
    for size in sizes:
        decode_only = mode.separate_decode and mixed_end is not None and size > mixed_end
        if mode.mixed is not RuntimeMode.NONE and not decode_only:
            yield _Shape(mode.mixed, size)
        if not mode.separate_decode:
            continue
        if varlen_decode:
            bound = max(query_lens)
            if size <= bound * max_num_reqs:
                yield _Shape(mode.decode, size, None, bound)
            continue
        for query_len in query_lens:
            rounded = -(-size // query_len) * query_len
            if rounded <= min(max(sizes), query_len * max_num_reqs):
                yield _Shape(mode.decode, rounded, query_len)
