"""What one prepared model works with, from `prepare` to `close`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...cache import Cache
from ...config import Config
from ..backends.protocol import GraphBackend
from .exchange import Exchange, single_rank
from .records import Records


@dataclass(frozen=True, slots=True)
class Environment:
    """The settings, the device and the services of one prepared model."""

    config: Config
    backend: GraphBackend
    device: torch.device
    cache: Cache
    records: Records
    exchange: Exchange = single_rank
