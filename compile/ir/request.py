"""The parameters of one compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ...cache import Cache
from ...events import Events
from .config import CompileConfig


@dataclass(frozen=True)
class CompileRequest:
    """A model to compile, and with what.

    `examples` are (args, kwargs) to trace with, if given. `exchange(topic, facts)` gives the facts
    of every rank, by rank, where several must start alike.
    """

    model: torch.nn.Module
    config: CompileConfig
    cache: Cache
    events: Events
    device: torch.device
    examples: ExampleArguments | None = None
    exchange: Callable[[str, Mapping[str, Any]], list[dict[str, Any]]] | None = None


ExampleArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""(args, kwargs) of one call."""
