"""Compares prepared steps with the eager model on the same inputs and the same cache contents.

The eager model runs on the KV cache as it was before the step, and what it writes is undone, so
that neither run sees the other's writes. Compared are the output's real rows, within what rounding
alone changes, and the cache: a step may change only its own slots and the dump block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ... import BatchDescriptor, ForwardContext, PreparedModel, RuntimeMode, forward_context
from ...compile.guards.tolerance import compare
from ...runtime.core.preserved import SavedMemory, preserve
from ..engine.block_manager import DUMP_BLOCK
from ..engine.kv_cache import LayerCache
from ..engine.metadata import AttentionMetadata
from ..engine.serving_log import Clock

SAMPLE_EVERY = 16


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first difference; `what` names the row of the output or the slot of the cache."""

    step: int
    mode: str
    descriptor: BatchDescriptor
    what: str

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "descriptor": self.descriptor.as_json()}


@dataclass(slots=True)
class VerificationResult:
    """`max_abs_diff` is over the finite differences of all `steps` compared. Of `not_compared` ones
    nothing is known: rounding alone changes all of a row."""

    steps: int = 0
    max_abs_diff: float = 0.0
    not_compared: int = 0
    mismatch: Mismatch | None = None

    @property
    def ok(self) -> bool:
        return self.mismatch is None


class Verifier:
    """Runs steps, and selected steps a second time; `run` replaces `prepared.run`.

    It selects the first step of each recording (runtime mode and padded size), the first one
    without a graph, and every `every`-th step.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        model: torch.nn.Module,
        layers: Mapping[str, LayerCache],
        *,
        clock: Clock,
        every: int,
    ) -> None:
        self.prepared = prepared
        self.model = model
        self.layers = layers
        self.clock = clock
        self.every = every
        self.result = VerificationResult()
        self._step = -1
        self._seen: set[tuple[str, int]] = set()

    def run(self, decision: Any, *inputs: torch.Tensor, metadata: AttentionMetadata) -> Any:
        """A step's output; the clock is paused during verification."""
        self._step += 1
        if not self._picks(decision):
            return self.prepared.run(decision, *inputs, metadata=metadata)
        with self.clock.stopped():
            caches = {name: [each.keys, each.values] for name, each in self.layers.items()}
            before = {name: SavedMemory(tensors) for name, tensors in caches.items()}
        output = self.prepared.run(decision, *inputs, metadata=metadata)

        def run() -> torch.Tensor:
            for saved in before.values():
                saved.restore()
            return run_eagerly(self.model, self.layers, metadata, *inputs)

        with self.clock.stopped():
            wrong = _stray_write(before, metadata)
            if wrong is None and len(inputs[0]):  # a rank may have no requests
                with preserve([each for tensors in caches.values() for each in tensors]):
                    wrong = self._difference(output, run(), run)
            self._book(decision, wrong)
        return output

    def _picks(self, decision: Any) -> bool:
        recorded = decision.mode != RuntimeMode.NONE
        kind = (decision.mode.name, decision.descriptor.num_tokens if recorded else 0)
        first = kind not in self._seen
        self._seen.add(kind)
        return first or self._step % self.every == 0

    def _difference(
        self, output: torch.Tensor, expected: torch.Tensor, run: Callable[[], torch.Tensor]
    ) -> str | None:
        """The first row that differs, in words; keeps the largest difference."""
        if output.shape != expected.shape:
            return f"shape {tuple(output.shape)} instead of {tuple(expected.shape)}"
        difference = (output.float() - expected.float()).abs()
        largest = difference.nan_to_num(0.0, 0.0, 0.0).max().item()
        self.result.max_abs_diff = max(self.result.max_abs_diff, largest)
        wrong = compare(expected, output, run)
        if wrong is None:
            return None
        if wrong.unknown:
            self.result.not_compared += 1
            return None
        return f"row {wrong.row} differs by {difference[wrong.row].max().item():.3g}"

    def _book(self, decision: Any, what: str | None) -> None:
        self.result.steps += 1
        if what and self.result.ok:
            self.result.mismatch = Mismatch(
                self._step, decision.mode.name, decision.descriptor, what
            )


def _changed_slots(elements: torch.Tensor) -> torch.Tensor:
    """Which cache slots have a changed element; keys and values may differ in shape."""
    return elements.flatten(0, 1).flatten(1).any(dim=1)


def _stray_write(before: Mapping[str, SavedMemory], metadata: AttentionMetadata) -> str | None:
    """The first cache slot that changed though the step does not own it, in words."""
    own = metadata.unpadded().slot_mapping
    for name, saved in before.items():
        keys, values = saved.changed(saved.now())
        block_size = keys.shape[1]
        changed = _changed_slots(keys) | _changed_slots(values)
        changed[own] = False
        changed[DUMP_BLOCK * block_size : (DUMP_BLOCK + 1) * block_size] = False
        if changed.any():
            slot = int(changed.nonzero()[0].item())
            return f"{name} wrote to cache slot {slot}, which is not the step's"
    return None


def run_eagerly(
    model: torch.nn.Module,
    layers: Mapping[str, LayerCache],
    metadata: AttentionMetadata,
    *inputs: torch.Tensor,
) -> torch.Tensor:
    """The model's output for only the real rows; writes into `layers`."""
    with forward_context(ForwardContext(layers, metadata.unpadded())), torch.no_grad():
        output: torch.Tensor = model(*inputs)
    return output
