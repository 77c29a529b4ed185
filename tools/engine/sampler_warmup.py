"""Warms the sampler: every kernel it may need, for every number of rows that gets a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ... import AuxiliaryTask
from .sampler import Sampler
from .sampling_params import SamplingParams

CONFIGURATIONS = (
    SamplingParams(0.0, 1.0, 0),
    SamplingParams(1.0, 1.0, 0),
    SamplingParams(0.7, 0.9, 50),
    SamplingParams(0.3, 0.95, 20),
    SamplingParams(1.2, 0.8, 100),
    SamplingParams(0.8, 0.85, 0),
)
"""Each is run twice, for a batch that has changed and for one that has not: twelve in all."""


def sampler_warmup(
    sampler: Sampler,
    logits: Callable[[torch.Tensor], torch.Tensor],
    batch_sizes: Iterable[int],
    hidden: torch.Tensor,
) -> AuxiliaryTask:
    """The task, for 1 and the distinct `batch_sizes`; `hidden` (1, hidden_size) is like a row.

    The sampler draws afterwards what it would have drawn without.
    """

    def run(batch_size: int) -> None:
        state = sampler.generator.get_state()
        rows = logits(torch.randn_like(hidden.expand(batch_size, -1)))
        for params in CONFIGURATIONS:
            sampler.forget_batch()
            for _ in ("changed", "unchanged"):
                sampler.sample(rows, [params] * batch_size)
        sampler.forget_batch()
        sampler.generator.set_state(state)

    sizes = tuple(dict.fromkeys((1, *(size for size in batch_sizes if size))))
    return AuxiliaryTask("sampler", sizes, "sampling follows each step that completes a row", run)
