"""Tests for a model of your own: one per capture mode and strategy, on any machine.

On a CPU graphs are emulated by the replay backend. What would be a silently wrong result on a GPU
is an error or a different result there. `compiler="eager"` skips Inductor and keeps tests fast.
"""

from __future__ import annotations

import pytest
import torch

import piecegraph as pg


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = self.up(x)
        output = torch.empty_like(query)
        torch.ops.capture_modes.attention(query, output)
        return self.down(output)


def attention(query: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(query.tanh())


library = torch.library.Library("capture_modes", "DEF")
library.define("attention(Tensor query, Tensor(a!) output) -> ()")
torch.library.register_fake("capture_modes::attention", lambda *args: None, lib=library)
library.impl("attention", attention, "CompositeExplicitAutograd")


def prepare(**settings: object) -> pg.PreparedModel:
    config = pg.Config(
        splitting_ops=("capture_modes::attention",),
        attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
        inputs={"x": "float32[num_tokens, 8]"},
        max_num_tokens=16,
        max_num_reqs=16,
        capture_sizes=(2, 4, 8),
        compiler="eager",
        cache=False,
        steps={"after_seal": "raise_all"},
        **settings,
    )
    return pg.prepare(Model(), config, backend="replay")


def check_step(prepared: pg.PreparedModel, batch: pg.Batch) -> str:
    """Run one step and compare it with the model; returns mode and padded size."""
    x = torch.randn(batch.num_tokens, 8)
    decision = prepared.dispatch(batch)
    torch.testing.assert_close(prepared.run(decision, x), prepared.compiled.model(x))
    return f"{decision.mode.name} {decision.descriptor.num_tokens}"


DECODE = pg.Batch(3, 3, is_decode=True, query_len=1)
MIXED = pg.Batch(7, 2)
TOO_LARGE = pg.Batch(12, 2)


@pytest.mark.parametrize(
    ("graph_mode", "decode", "mixed"),
    [
        ("NONE", "NONE 3", "NONE 7"),
        ("PIECEWISE", "PIECEWISE 4", "PIECEWISE 8"),
        ("FULL_DECODE_ONLY", "FULL 4", "NONE 7"),
        ("FULL_AND_PIECEWISE", "FULL 4", "PIECEWISE 8"),
    ],
)
def test_each_mode(graph_mode: str, decode: str, mixed: str) -> None:
    prepared = prepare(graph_mode=graph_mode)
    prepared.capture()
    prepared.seal()
    assert check_step(prepared, DECODE) == decode
    assert check_step(prepared, MIXED) == mixed
    assert check_step(prepared, TOO_LARGE) == "NONE 12"


def test_delayed_captures_a_few_graphs_per_step() -> None:
    prepared = prepare(graph_mode="PIECEWISE", strategy="delayed")
    prepared.capture()
    assert [check_step(prepared, MIXED) for _ in range(3)][-1] == "PIECEWISE 8"
    assert len(prepared.recordings()) == 3


def test_lazy_captures_what_is_used() -> None:
    prepared = prepare(graph_mode="PIECEWISE", strategy="lazy")
    prepared.capture()  # the largest size of each mode
    small = pg.Batch(3, 1)
    assert check_step(prepared, MIXED) == "PIECEWISE 8"
    assert check_step(prepared, small) == "PIECEWISE 4"
    assert len(prepared.recordings()) == 2
