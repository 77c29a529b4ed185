"""From logits to next tokens: greedy, by temperature, among the top k or the top p."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sampling_params import SamplingParams


class Sampler:
    """Draws with a generator of its own; parameters become tensors only when the batch changes."""

    def __init__(self, *, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        self._params: tuple[SamplingParams, ...] = ()
        self._tensors: tuple[torch.Tensor, ...] = ()

    def sample(self, logits: torch.Tensor, params: Sequence[SamplingParams]) -> list[int]:
        """The next token of each row (rows, vocab), one of `params` a row. Waits for the device."""
        if all(each.temperature == 0 for each in params):
            greedy: list[int] = logits.argmax(dim=-1).tolist()
            return greedy
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
        sampled: list[int] = chosen.squeeze(1).tolist()
        return sampled

    def forget_batch(self) -> None:
        """The next call makes its parameters' tensors anew, as it does for another batch."""
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
