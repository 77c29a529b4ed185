"""A rig per backend: the same tests run on the CPU emulation and, where there is one, a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from piecegraph.events import Events
from piecegraph.runtime.backend import GraphBackend
from piecegraph.runtime.capture_session import capture_session
from piecegraph.runtime.choose_backend import choose_backend
from piecegraph.runtime.recorder import record
from piecegraph.runtime.recording import Recording
from piecegraph.runtime.replay_backend import ReplayBackend, ReplayOptions


@dataclass
class Rig:
    """A backend with one pool; `record` opens a session for one recording."""

    backend: GraphBackend
    device: torch.device
    events: Events
    pool: Any

    def record(
        self, fn: Callable[..., Any], *inputs: torch.Tensor, breaks: bool = True
    ) -> Recording:
        with capture_session(self.backend, self.pool, self.events, prepare=False) as session:
            return record(fn, inputs, session, name="test", breaks=breaks)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, device=self.device)


def make_rig(backend: GraphBackend, device: str) -> Rig:
    return Rig(backend, torch.device(device), Events(), backend.new_pool())


@pytest.fixture(params=["replay", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """On the replay backend everything is poisoned that may be."""
    with torch.no_grad():
        if request.param == "replay":
            options = ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True)
            yield make_rig(ReplayBackend(options), "cpu")
        else:
            yield make_rig(choose_backend("cuda"), "cuda")


@pytest.fixture
def make_replay_rig() -> Iterator[Callable[..., Rig]]:
    """A rig on the replay backend with the given `ReplayOptions`."""
    with torch.no_grad():
        yield lambda **options: make_rig(ReplayBackend(ReplayOptions(**options)), "cpu")
