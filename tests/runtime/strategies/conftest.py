"""A small model under any strategy, served on the replay backend with everything poisoned.

It is traced once for all tests and not compiled; each test gets a prepared model of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, Config, Events, GraphMode, PreparedModel, get_forward_context
from piecegraph.cache import Cache
from piecegraph.compile.lower.compiled_model import CompiledModel
from piecegraph.compile.pipeline import CompileRequest, compile_model
from piecegraph.runtime.backends.replay import ReplayBackend

from ..conftest import prepare_on_replay


def scale(x: Tensor, out: Tensor) -> None:
    context = get_forward_context()
    out.copy_(x * context.layers["scale"])


class Model(nn.Module):
    """x -> (x + 1) * 3 * 2 + 1, the factor 3 by a splitting op."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.shift
        out = torch.empty_like(y)
        torch.ops.strategy_tests.scale(y, out)
        return out * 2 + 1


@dataclass
class Served:
    """A prepared model and what serves it one batch at a time."""

    prepared: PreparedModel
    backend: ReplayBackend

    def decode(self, n: int) -> str:
        return self.step(Batch(n, n, is_decode=True, query_len=1))

    def mixed(self, n: int) -> str:
        return self.step(Batch(n, 1))

    def step(self, batch: Batch) -> str:
        """One step of random rows, its result checked; returns mode and padded size."""
        x = torch.randn(batch.num_tokens, 4)
        decision = self.prepared.dispatch(batch)
        torch.testing.assert_close(self.prepared.run(decision, x), (x + 1) * 6 + 1)
        return f"{decision.mode.name} {decision.descriptor.num_tokens}"

    @property
    def captures(self) -> list[str]:
        """Captures in the order in which they were made."""
        return [_name(event) for event in self.prepared.events.named("capture")]

    def told(self, event: str) -> list[str]:
        return [_name(each) for each in self.prepared.events.named(event)]

    @property
    def used(self) -> int:
        return self.backend.memory().used


def _name(event: Any) -> str:
    return f"{event.facts['mode']} {event.facts['num_tokens']}"


@pytest.fixture(scope="session")
def compiled(temporary_op: Callable[..., str]) -> tuple[Config, CompiledModel]:
    op = temporary_op("strategy_tests::scale", "(Tensor x, Tensor(a!) out) -> ()", scale)
    config = Config(
        splitting_ops=(op,),
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=2048,
        max_num_reqs=2048,
        compiler="eager",
        cache=False,
    )
    cache = Cache(None, Events())
    return config, compile_model(
        CompileRequest(Model(), config, cache, Events(), torch.device("cpu"))
    )


@pytest.fixture
def make(compiled: tuple[Config, CompiledModel]) -> Callable[..., Served]:
    def make_served(
        sizes: Sequence[int] = (1, 2, 4, 8),
        *,
        mode: GraphMode = GraphMode.FULL_AND_PIECEWISE,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Served:
        base, model = compiled
        layers, config = {"scale": torch.tensor(3.0)}, base.changed(**settings)
        prepared = prepare_on_replay(model, config, mode, sizes, layers, options or {})
        return Served(prepared, prepared.backend)

    return make_served
