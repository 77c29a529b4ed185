"""Samples next tokens from logits: greedy, by temperature, among the top k or the top p.

A draw is the inverse of the cumulative distribution at one number in [0, 1), a hash of the
request's seed and of the place of the token in the request. So a request's tokens depend neither
on the requests that it shares steps with, nor on chunks, drafts, preemption or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import torch

from ... import AuxiliaryTask
from .metadata import uploaded
from .scheduler import SamplingParams

WARMED = (
    SamplingParams(0.0, top_k=0, top_p=1.0),
    SamplingParams(1.0, top_k=0, top_p=1.0),
    SamplingParams(0.7, top_k=50, top_p=0.9),
    SamplingParams(0.3, top_k=20, top_p=0.95),
    SamplingParams(1.2, top_k=100, top_p=0.8),
    SamplingParams(0.8, top_k=0, top_p=0.85),
)
"""Settings that warm-up runs: every combination of the code below."""


class Sampler:
    """Samples batches of requests with mixed settings.

    Tensors of the settings are made when the batch changes. A step with a temperature copies one
    float64 for each row to the device; a greedy one copies nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._batch: list[SamplingParams] | None = None
        self._columns: tuple[torch.Tensor, ...] | None = None

    def sample(
        self, logits: torch.Tensor, draws: Sequence[tuple[SamplingParams, int]]
    ) -> torch.Tensor:
        """The next token of each row of `logits` (rows, vocab): (rows,), int64, on the device.

        `draws` has each row's settings, and the place of its token in its request.
        """
        batch = [params for params, _ in draws]
        if batch != self._batch:
            self._batch, self._columns = batch, self._columns_of(batch, logits.shape[-1])
        best = logits.argmax(dim=-1)
        if self._columns is None:
            return best
        temperature, *filters = self._columns
        scores = logits.float()
        scores = scores - scores.amax(dim=-1, keepdim=True)
        scores = scores / temperature.masked_fill(temperature == 0, 1)
        if filters:
            scores = _filtered(scores, *filters)
        chances = scores.softmax(-1).cumsum(-1, dtype=torch.float64)
        points = self._column([_uniform(params.seed, place) for params, place in draws])
        drawn = torch.searchsorted(chances, points * chances[:, -1:], right=True).squeeze(1)
        return torch.where(temperature.squeeze(1) > 0, drawn, best)

    def warmup(self, logits: Callable[[int], torch.Tensor], sizes: Iterable[int]) -> AuxiliaryTask:
        """Sample batches of 0 and 1 rows and of `sizes`; `logits(rows)` gives (rows, vocab).

        Each with the settings of WARMED, for a batch that has changed and for one that has not.
        """

        def run(rows: int) -> None:
            scores = logits(rows)
            for params in WARMED:
                self._batch = None
                for _ in ("changed", "unchanged"):
                    self.sample(scores, [(params, 0)] * rows)
            self._batch = None

        return AuxiliaryTask(
            "sampler",
            sorted({0, 1, *sizes}),
            f"steps sample after the model: {len(WARMED)} settings, batch changed or not",
            run,
            "the first step of each number of rows and kind of sampling loads its kernels",
        )

    def _columns_of(
        self, batch: Sequence[SamplingParams], vocab: int
    ) -> tuple[torch.Tensor, ...] | None:
        """Temperature, and top k and top p if any row has one, (rows, 1) each; None if all rows
        are greedy."""
        if all(params.temperature == 0 for params in batch):
            return None
        temperature = self._column([params.temperature for params in batch]).float()
        if all(params.top_k == 0 and params.top_p == 1 for params in batch):
            return (temperature,)
        top_k = self._column([params.top_k or vocab for params in batch])
        return temperature, top_k, self._column([params.top_p for params in batch])

    def _column(self, values: Sequence[float]) -> torch.Tensor:
        """(rows, 1), float64; the host does not wait for the device."""
        return uploaded(values, self._device, torch.float64)[:, None]


def _filtered(scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`scores` (rows, vocab) with -inf for what is not drawn; of equal ones the first are kept.

    A row with all k and a p of 1 keeps its scores bit by bit.
    """
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device)
    ordered = ordered.masked_fill(places >= top_k, -torch.inf)
    chances = ordered.softmax(-1)
    before = chances.cumsum(-1, dtype=torch.float64) - chances
    ordered = ordered.masked_fill((before >= top_p) & (top_p < 1), -torch.inf)
    return scores.scatter(-1, tokens, ordered)


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) with 53 random bits."""
    digest = blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) * 2.0**-53
