"""A batch as the engine states it, and the key it is dispatched to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Batch:
    """The facts of one step; mutable, so that an engine may keep one and update it.

    `num_tokens` and `num_reqs` count real rows. `is_decode` is a fact: every request is past its
    prefill. It is never derived from shapes, since a prefill chunk can look like a decode.
    `query_len` is the query length that all requests have, or None if they differ; then
    `max_query_len` may bound it. `num_loras` counts the active adapters, the base model among
    them when it shares a batch with others. `axes` has a value for each extra axis of the plan.
    """

    num_tokens: int
    num_reqs: int
    is_decode: bool = False
    query_len: int | None = None
    num_loras: int = 0
    cascade: bool = False
    max_query_len: int | None = None
    axes: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The dispatch key: padded shape and every other host value that may reach a kernel launch.

    None means that the graph does not depend on the value. A descriptor with `uniform_query_len`
    serves decode batches of just that query length, one with `max_query_len` decode batches up
    to it. `lora_case` is the number of adapters the graph has room for; `axes` are (name, value)
    in the plan's order.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform_query_len: int | None = None
    max_query_len: int | None = None
    lora_case: int = 0
    axes: tuple[tuple[str, int], ...] = ()

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
