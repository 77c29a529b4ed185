"""What goes into dispatch and what comes out: `Batch`, `BatchDescriptor`, `Decision`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from numbers import Integral
from types import NoneType
from typing import Any

from ..errors import BatchInvalid
from .modes import Members, RuntimeMode

NO_GRAPH = -1
"""The graph_index of NONE, which has no recording."""

FORM = "form"
"""The axis of a model with several call forms: the number of the form in `Config.inputs`."""


@dataclass(slots=True)
class Batch:
    """The facts of one step, stated by the engine. Mutable, so that one object can be reused.

    `num_tokens` and `num_reqs` count real rows. `is_decode` means that every request is past its
    prefill; it is never derived from shapes, because a prefill chunk can look like a decode.
    `query_len` is the query length of all requests, or None if they differ; then `max_query_len`
    may bound it. `num_loras` counts the active adapters, and the base model as one more if it
    shares the batch with adapters. `axes` has a value for each extra axis of the plan.

    Raises BatchInvalid for counts that are no integers: to read one from a tensor would wait for
    the device.
    """

    num_tokens: int
    num_reqs: int
    is_decode: bool = False
    query_len: int | None = None
    num_loras: int = 0
    cascade: bool = False
    max_query_len: int | None = None
    axes: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        if not (type(self.num_tokens) is int is type(self.num_reqs)) and (
            fault := wrong_type(self)
        ):
            raise BatchInvalid(batch=self, fault=fault)


_COUNTS: dict[str, tuple[type, ...]] = {
    "num_tokens": (),
    "num_reqs": (),
    "num_loras": (),
    "query_len": (NoneType,),
    "max_query_len": (NoneType,),
}


def wrong_type(batch: Any) -> str | None:
    """The first field of `batch` that is not of its type, or None. Integers of numpy are ints."""
    if not isinstance(batch, Batch):
        return f"it is a {type(batch).__name__}"
    for name, others in _COUNTS.items():
        value = getattr(batch, name)
        if type(value) is not int and not isinstance(value, (Integral, *others)):
            return f"{name} is {value!r}, not an int"
    for name in ("is_decode", "cascade"):
        value = getattr(batch, name)
        if type(value) is not bool and not _is_flag(value):
            return f"{name} is {value!r}, not a bool"
    axes: Any = batch.axes
    if axes is not None and not isinstance(axes, Mapping):
        return f"axes is {axes!r}, not a mapping of names to ints"
    return None


def _is_flag(value: Any) -> bool:
    """Whether it equals a bool, as one of numpy does. A tensor is found by its hash to be none: to
    compare it would read it from the device, or raise."""
    try:
        return value in {False, True}
    except TypeError:  # no hash: an array
        return False


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The dispatch key: the padded shape and every other host value that may reach a kernel launch.

    None means that the graph does not depend on the value. A descriptor with `uniform_query_len`
    serves decode batches of exactly that query length, one with `max_query_len` decode batches up
    to it. `lora_case` is the largest number of active adapters; `axes` are (name, value) pairs in
    the plan's order.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform_query_len: int | None = None
    max_query_len: int | None = None
    lora_case: int = 0
    axes: tuple[tuple[str, int], ...] = ()

    @property
    def form(self) -> int:
        """The number of the call form in `Config.inputs`."""
        return dict(self.axes).get(FORM, 0)

    @property
    def for_decode(self) -> bool:
        """Whether only decode batches may use it."""
        return self.uniform_query_len is not None or self.max_query_len is not None

    def as_json(self) -> dict[str, Any]:
        return {
            "num_tokens": self.num_tokens,
            "num_reqs": self.num_reqs,
            "uniform_query_len": self.uniform_query_len,
            "max_query_len": self.max_query_len,
            "lora_case": self.lora_case,
            "axes": dict(self.axes),
        }


class Reason(StrEnum, metaclass=Members):
    """Why a graph was chosen, or why no graph or no better one was."""

    EXACT = "exact"
    PADDED = "padded"
    RELAXED = "relaxed"
    """A decode batch on a graph that serves other query lengths too."""
    RANK_DECISION = "rank decision"

    NO_TOKENS = "no tokens"
    CAPABILITY = "no graph for this kind of batch"
    AXIS = "no graph for these axis values"
    LORA_CASE_MISSING = "LoRA case missing"
    CASCADE = "cascade attention"
    EXCLUDED = "excluded by caller"
    ABOVE_LARGEST_SIZE = "above largest size"
    TOO_MANY_REQS = "too many requests"
    PADDING_LIMIT = "padding limit"
    NOT_CAPTURED = "not captured yet"


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run one step.

    `reason` says how the graph fits or, for NONE, why there is no graph. `missed` says why no
    graph of a better mode was chosen, for the candidate that came closest; it is None if the plan
    has no better mode. `max_reqs` is the largest number of requests for which the decision holds.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor
    graph_index: int
    reason: Reason
    missed: Reason | None = None
    max_reqs: int = sys.maxsize
