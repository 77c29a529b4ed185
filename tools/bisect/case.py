"""The input of a search: a model, its settings and the steps that show the wrong result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import Batch, BatchDescriptor, Config, Decision, Reason, RuntimeMode


@dataclass(frozen=True, slots=True)
class Step:
    """One step: the real inputs, the batch's facts, and metadata or a function of the decision."""

    args: tuple[Any, ...]
    batch: Batch
    metadata: Any = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def metadata_for(self, decision: Decision) -> Any:
        return self.metadata(decision) if callable(self.metadata) else self.metadata

    def without_graph(self) -> Decision:
        """The decision for a run of only the real rows."""
        descriptor = BatchDescriptor(self.batch.num_tokens)
        return Decision(RuntimeMode.NONE, descriptor, -1, Reason.EXCLUDED)


@dataclass(frozen=True, slots=True)
class BisectCase:
    """A model with `steps`, which are run in order, from the same state on every stage.

    `layers` is what splitting ops find in the forward context, `capture_metadata` what
    `PreparedModel.capture` takes. A step is wrong where an element differs from the eager model's
    by more than `tolerance`, absolute and relative; None chooses by dtype.
    """

    model: torch.nn.Module
    config: Config
    steps: Sequence[Step]
    layers: Mapping[str, Any] = field(default_factory=dict)
    capture_metadata: Callable[[BatchDescriptor, RuntimeMode], Any] | None = None
    tolerance: float | None = None
