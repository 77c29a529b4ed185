"""What a graph's padding holds."""

from __future__ import annotations

from enum import StrEnum


class Padding(StrEnum):
    """What a step writes into the padding of an input. KEEP leaves what is there: zeros at first,
    later an earlier step's values."""

    ZERO = "zero"
    SENTINEL = "sentinel"
    REPEAT = "repeat"
    KEEP = "keep"
