"""Find a graph backend by name: built in, or registered by an installed package."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from ...errors import UnknownBackend
from .protocol import GraphBackend

GROUP = "piecegraph.backends"


def choose_backend(name: str) -> GraphBackend:
    """A new backend. An entry point in `GROUP` names a callable without arguments that returns one.

    Raises `UnknownBackend`, or `BackendUnavailable` if the device it needs is missing.
    """
    if name == "replay":
        from .replay import ReplayBackend

        return ReplayBackend()
    if name == "cuda":
        from .cuda import CudaBackend

        return CudaBackend()
    registered = {point.name: point for point in entry_points(group=GROUP)}
    if name not in registered:
        raise UnknownBackend(name=name, known=["replay", "cuda", *sorted(registered)], group=GROUP)
    make: Callable[[], GraphBackend] = registered[name].load()
    return make()
