"""A small model under any strategy, served on the replay backend with everything poisoned.

It is traced once for all tests and not compiled; each test gets a prepared model of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, Config, Dispatcher, Events, PreparedModel, get_forward_context
from piecegraph.cache import Cache
from piecegraph.compile.compile_model import Task, compile_model
from piecegraph.compile.compiled_model import CompiledModel
from piecegraph.dispatch import GraphMode, make_plan, resolve_mode
from piecegraph.runtime.ranks import Ranks
from piecegraph.runtime.replay_backend import ReplayBackend, ReplayOptions

SPLITTING_OP = "strategy_tests::scale"


@pytest.fixture(scope="session")
def splitting_op() -> Iterator[str]:
    def scale(x: Tensor, out: Tensor) -> None:
        out.copy_(x * get_forward_context().layers["scale"])

    library: Any = torch.library.Library("strategy_tests", "DEF")
    library.define("scale(Tensor x, Tensor(a!) out) -> ()")
    library.impl("scale", scale, "CPU")
    torch.library.register_fake(SPLITTING_OP, lambda x, out: None, lib=library)
    yield SPLITTING_OP
    library._destroy()


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
def compiled(splitting_op: str) -> tuple[Config, CompiledModel]:
    config = Config(
        splitting_ops=(splitting_op,),
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=2048,
        max_num_reqs=2048,
        compiler="eager",
        cache=False,
    )
    cache = Cache(None, Events())
    return config, compile_model(Task(Model(), config, cache, Events(), torch.device("cpu")))


@pytest.fixture
def make(compiled: tuple[Config, CompiledModel]) -> Callable[..., Served]:
    def make_served(
        sizes: Sequence[int] = (1, 2, 4, 8),
        *,
        mode: GraphMode = GraphMode.FULL_AND_PIECEWISE,
        ranks: Ranks | None = None,
        options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> Served:
        base, model = compiled
        config = base.changed(**settings)
        backend = ReplayBackend(
            ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True, **(options or {}))
        )
        prepared = PreparedModel(
            model,
            inspect.signature(Model.forward).replace(
                parameters=[*inspect.signature(Model.forward).parameters.values()][1:]
            ),
            config,
            resolve_mode(mode, support=config.supports(), pieces=True, level=2, query_len=1),
            Dispatcher(make_plan(mode, sizes, max_num_reqs=config.max_num_reqs)),
            backend,
            torch.device("cpu"),
            Cache(None, Events()),
            {"scale": torch.tensor(3.0)},
            Events(),
            ranks,
        )
        return Served(prepared, backend)

    return make_served
