"""What came of serving a trace under one capture strategy."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ServingResult:
    """Times in seconds: until the engine is ready, from arrivals to first tokens, between tokens,
    and of all captures. `captured` and `used` count graphs."""

    ready: float = 0.0
    first_token: list[float] = field(default_factory=list)
    inter_token: list[float] = field(default_factory=list)
    capture: float = 0.0
    captured: int = 0
    used: int = 0
    bytes: int = 0
