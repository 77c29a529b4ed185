"""What the dispatcher answers: a runtime mode, a descriptor, a graph index, and why."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import StrEnum

from .descriptor import BatchDescriptor
from .modes import RuntimeMode

NO_GRAPH = -1
"""The graph_index of NONE, which has no recording."""


class Reason(StrEnum):
    """Why a graph was taken, or why none or no better one was."""

    EXACT = "exact"
    PADDED = "padded"
    RELAXED = "relaxed"
    """A decode batch on a graph that is not for its query length alone."""
    CHUNKED = "chunked"
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
    COST = "costs more"


@dataclass(frozen=True, slots=True)
class Decision:
    """How to run one step.

    `reason` tells how the graph fits or, for NONE, why there is no graph. `missed` tells why no
    graph of a better mode was taken, by the candidate that came nearest; it is None where the
    plan has none better. `chunks` are the indices to replay one after another over consecutive
    tokens when the batch is above the largest size. `max_reqs` is how many requests a batch of so
    many tokens can have here.
    """

    mode: RuntimeMode
    descriptor: BatchDescriptor
    graph_index: int
    reason: Reason
    missed: Reason | None = None
    chunks: tuple[int, ...] = ()
    max_reqs: int = sys.maxsize
