"""Padding policies: what a step writes into the padding of an input."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...compile.ir.plan import UserInput
from ...config import Padding, Steps
from ...errors import InvalidSetting


@dataclass(frozen=True, slots=True)
class PaddingPolicy:
    """The policy of one input. Only this class and `config.Padding` know the kinds.

    REPEAT repeats the last real row (zeros if there is none); SENTINEL writes `value`, such as a
    cache slot reserved for padding.
    """

    kind: Padding = Padding.ZERO
    value: int | float = 0
    """What padding holds in a batch without real rows; 0 for all kinds but SENTINEL."""

    @property
    def is_sentinel(self) -> bool:
        """Whether the user states the value, so that the model never sees another."""
        return self.kind is Padding.SENTINEL

    @property
    def each_step(self) -> bool:
        """Whether padding depends on the rows of the step, so that each step writes it again."""
        return self.kind is Padding.REPEAT

    def content(self, last: Tensor | None) -> Tensor | float | None:
        """What padding behind the real row `last` holds: a value or that row; None: it stays.

        `last` has one row in the dimension that is padded; it is None if no row is real.
        """
        if self.kind is Padding.KEEP:
            return None
        return last if self.kind is Padding.REPEAT and last is not None else self.value


ZEROS = PaddingPolicy()


def padding_policy(steps: Steps, item: UserInput) -> PaddingPolicy:
    """The policy that the settings state for an input; a number is a sentinel.

    Raises InvalidSetting for a number that the input cannot hold.
    """
    setting, dtype = steps.padding.get(item.label, Padding.ZERO), getattr(torch, item.dtype)
    if isinstance(setting, Padding):
        return PaddingPolicy(setting)
    if not (dtype.is_floating_point or dtype.is_complex):
        low, high = 0, 1
        if dtype is not torch.bool:
            low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        if not low <= setting <= high or setting != int(setting):
            raise InvalidSetting(
                name=f"steps.padding.{item.label}",
                value=setting,
                reason=f"the input is {item.dtype}",
                expected=f"an integer from {low} to {high}",
            )
    return PaddingPolicy(Padding.SENTINEL, setting)
