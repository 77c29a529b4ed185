"""Samples next tokens from logits: greedy, by temperature, among the top k or the top p."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from ... import AuxiliaryTask
from .scheduler import SamplingParams


class Sampler:
    """Draws with its own generator; parameter tensors are created only when the batch changes."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._params: tuple[SamplingParams, ...] = ()
        self._tensors: tuple[torch.Tensor, ...] = ()

    def sample(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
        """The next token of each row (rows, vocab); `params` has one per row. Synchronizes."""
        sampled: list[int] = self.draw(logits, params).tolist()
        return sampled

    def draw(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
        """The tokens that `sample` returns, (rows,) on the device."""
        if all(each.temperature == 0 for each in params):
            return logits.argmax(dim=-1)
        temperature, top_p, top_k = self._tensors_of(tuple(params), logits.shape[-1])
        scaled = logits.float() / temperature.clamp(min=1e-6)
        ordered, tokens = scaled.sort(dim=-1, descending=True, stable=True)
        places = torch.arange(logits.shape[-1], device=self._device)
        ordered = ordered.masked_fill(places >= top_k, -torch.inf)
        chances = ordered.softmax(-1)
        ordered_before = chances.cumsum(-1) - chances
        chances = chances.masked_fill((ordered_before >= top_p) & (places > 0), 0)
        drawn = torch.multinomial(chances, 1, generator=self.generator)
        chosen = torch.where(temperature == 0, tokens[:, :1], tokens.gather(1, drawn))
        return chosen.squeeze(1)

    def forget_batch(self) -> None:
        """The next call creates its parameter tensors again, as for a changed batch."""
        self._params, self._tensors = (), ()

    def _tensors_of(
        self, params: tuple[SamplingParams, ...], vocab: int
    ) -> tuple[torch.Tensor, ...]:
        """Temperature, top p and top k, each (rows, 1); a top k of 0 is the whole vocabulary."""
        if params != self._params:
            columns = (
                [each.temperature for each in params],
                [each.top_p for each in params],
                [each.top_k or vocab for each in params],
            )
            self._tensors = tuple(
                torch.tensor(column, device=self._device)[:, None] for column in columns
            )
            self._params = params
        return self._tensors


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
    """Warm-up task for size 1 and `batch_sizes`; `hidden` (1, hidden_size) is an example row.

    Later draws of the sampler are the same as without the warm-up.
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
