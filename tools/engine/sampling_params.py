"""How one request samples its next tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy; `top_k` 0 and `top_p` 1 exclude nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = SamplingParams()
