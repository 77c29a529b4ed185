"""The dispatch plan: which graphs there are to be, in the order of their indices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from ..errors import BatchInvalid, InvalidSetting, PlanInvalid
from .descriptor import Batch, BatchDescriptor
from .modes import GraphMode, RuntimeMode


@dataclass(frozen=True, slots=True)
class Axis:
    """An engine's own dimension of the key, with the values to capture for.

    A batch needs a graph of its very value, or with `rounds_up` of any value not below it.
    """

    name: str
    values: tuple[int, ...]
    rounds_up: bool = False


@dataclass(frozen=True, slots=True)
class PaddingLimit:
    """The most padding a graph may bring: padded tokens over real ones, and padding tokens."""

    factor: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value, least in (("factor", self.factor, 1), ("tokens", self.tokens, 0)):
            if value is not None and value < least:
                reason = "an exact fit would break it"
                expected = f"{least} or more"
                name = f"padding limit {name}"
                raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)

    def least_tokens(self, size: int) -> int:
        """The fewest real tokens for which a graph of `size` keeps the limit."""
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
    """All that decides a dispatch, so that ranks with equal digests decide alike.

    Entries are in capture order: PIECEWISE before FULL, the largest first. `chunked` allows
    PIECEWISE in chunks above the largest size. Raises PlanInvalid for an entry that is there
    twice, is NONE, is empty, or does not name exactly the plan's axes, each once.
    """

    entries: tuple[PlanEntry, ...]
    max_num_reqs: int
    axes: tuple[Axis, ...] = ()
    padding: PaddingLimit = PaddingLimit()
    chunked: bool = False

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) < len(names):
            raise PlanInvalid(fault=f"an axis of {names} is there twice")
        seen: set[PlanEntry] = set()
        for entry in self.entries:
            if entry.mode is RuntimeMode.NONE or entry.descriptor.num_tokens < 1:
                raise PlanInvalid(fault=f"{entry} is no graph")
            if [name for name, _ in entry.descriptor.axes] != names:
                raise PlanInvalid(fault=f"{entry} does not have the axes {names}")
            if entry in seen:
                raise PlanInvalid(fault=f"{entry} is there twice")
            seen.add(entry)

    @property
    def largest(self) -> int:
        """The largest size in tokens, 0 without entries."""
        return max((entry.descriptor.num_tokens for entry in self.entries), default=0)

    @property
    def digest(self) -> str:
        """sha256 over the plan as canonical JSON; ranks that must decide alike compare it."""
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
            "chunked": self.chunked,
        }


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
    """The one place where keys are made.

    A FULL graph holds attention, so its key says how many requests and, for decode, which query
    length; a PIECEWISE graph runs attention outside and is relaxed to tokens alone.
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
    given = batch.axes or {}
    names = [axis.name for axis in axes]
    if given.keys() != set(names):
        raise BatchInvalid(batch=batch, fault=f"the axes of the plan are {names}")
    return tuple((name, given[name]) for name in names)


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
    chunked: bool = False,
) -> DispatchPlan:
    """The plan of a resolved `mode` over capture `sizes` (see `default_capture_sizes`).

    `query_lens` are the query lengths of uniform decode; with `varlen_decode` decode batches are
    keyed by the longest of them as a bound. `lora_cases` come from the function of that name.
    Raises InvalidSetting for a query length below 1.
    """
    if min(query_lens, default=0) < 1:
        reason = "a decode request has tokens"
        raise InvalidSetting(
            name="query_lens", value=query_lens, reason=reason, expected="lengths of 1 or more"
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
        for shape in _shapes(mode, sizes, max_num_reqs, query_lens, varlen_decode)
        for lora_case, *values in product(lora_cases, *(axis.values for axis in axes))
    }
    ordered = sorted(entries, key=lambda entry: (entry.mode, -entry.descriptor.num_tokens))
    limit = padding or PaddingLimit()
    return DispatchPlan(tuple(ordered), max_num_reqs, tuple(axes), limit, chunked)


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
) -> Iterator[_Shape]:
    """What each size stands for: a mixed batch, and decode batches of each query length."""
    for size in sizes:
        if mode.mixed is not RuntimeMode.NONE:
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
