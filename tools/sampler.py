"""From logits to next tokens."""

from __future__ import annotations

import torch


def sample_greedily(logits: torch.Tensor) -> list[int]:
    """The best token of each row (rows, vocab), the first of equals. Waits for the device."""
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens
