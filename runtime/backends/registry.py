"""Find a graph backend by name: built in, or registered by an installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

import torch

from ...errors import UnknownBackend
from .protocol import GraphBackend

GROUP = "piecegraph.backends"


def choose_backend(name: str, device: torch.device) -> GraphBackend:
    """A new backend for a model on `device`.

    An entry point in `GROUP` names a callable that takes the device and makes one.

    Raises `UnknownBackend`, or `BackendUnavailable` if the device it needs is missing.
    """
    if name == "replay":
        from .replay.backend import ReplayBackend

        return ReplayBackend()
    if name == "cuda":
        from .cuda import CudaBackend

        return CudaBackend(device)
    registered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in registered:
        raise UnknownBackend(name=name, known=["replay", "cuda", *sorted(registered)], group=GROUP)
    make: Callable[[torch.device], GraphBackend] = registered[name].load()
    return make(device)
