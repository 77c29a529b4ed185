"""What is silent garbage on a device is wrong or an error on the replay backend, in pieces too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, Config, PreparedModel, get_forward_context, prepare
from piecegraph.errors import AllCapturesFailed, StaleContext
from piecegraph.runtime.backends.replay import ReplayBackend, ReplayOptions

pytestmark = pytest.mark.compile


def scaled(x: Tensor, out: Tensor) -> None:
    out.copy_(x * get_forward_context().metadata)


def kept(x: Tensor, out: Tensor) -> None:
    out.copy_(x * get_forward_context().layers["factor"])


def counted(x: Tensor, out: Tensor) -> None:
    out.fill_(len(x.nonzero()))


def read(x: Tensor, out: Tensor) -> None:
    out.fill_(x.sum().item())


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op: Callable[..., str]) -> None:
    for op in (scaled, kept, counted, read):
        schema = "(Tensor x, Tensor(a!) out) -> ()"
        temporary_op(f"faithful_tests::{op.__name__}", schema, op)


class Model(nn.Module):
    def __init__(self, op: Callable[..., None]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.op = getattr(torch.ops.faithful_tests, op.__name__)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.weight
        out = torch.empty_like(y)
        self.op(y, out)
        return out + 1


def prepared_for(op: Callable[..., None], *, poison: bool = True, **settings: Any) -> PreparedModel:
    """The op is in a piece: it is not among the splitting ops."""
    config = Config(
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=8,
        max_num_reqs=8,
        capture_sizes=(2, 4),
        attention_support=3,
        cache=False,
        **{"compiler": "eager", "graph_mode": "FULL", **settings},
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=poison))
    return prepare(Model(op), config, backend=backend, layers={"factor": 2.0})


def step(prepared: PreparedModel, metadata: Any) -> Tensor:
    result: Tensor = prepared(torch.ones(2, 4), batch=Batch(2, 2), metadata=metadata)
    return result


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_failure_23_an_op_in_a_piece_sees_the_context_of_the_capture(compiler: str) -> None:
    prepared = prepared_for(scaled, poison=False, compiler=compiler)
    assert step(prepared, 3.0).unique().item() == 7  # without a graph
    prepared.capture(lambda descriptor, mode: 5.0)
    assert step(prepared, 3.0).unique().item() == 11  # as wrong as on a device


def test_failure_23_with_poison_it_is_an_error_that_names_the_function() -> None:
    prepared = prepared_for(scaled)
    prepared.capture(lambda descriptor, mode: 5.0)
    with pytest.raises(StaleContext, match=r"scaled reads metadata .*splitting_ops") as caught:
        step(prepared, 3.0)
    line = scaled.__code__.co_firstlineno + 1
    assert caught.value.where is not None
    assert caught.value.where.endswith(f"test_faithful_replay.py:{line}")


def test_what_is_the_same_object_in_each_step_may_be_read() -> None:
    prepared, metadata = prepared_for(scaled), torch.tensor(5.0)
    prepared.capture(lambda descriptor, mode: metadata)
    metadata.fill_(3.0)
    assert step(prepared, metadata).unique().item() == 7
    prepared = prepared_for(kept)
    prepared.capture()
    assert step(prepared, object()).unique().item() == 5


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("op", [counted, read])
def test_a_host_read_in_a_piece_fails_the_capture_with_its_line(
    op: Callable[..., None], compiler: str
) -> None:
    prepared = prepared_for(op, compiler=compiler)
    line = op.__code__.co_firstlineno + 1
    with pytest.raises(AllCapturesFailed, match=f"on the host .*test_faithful_replay.py:{line}"):
        prepared.capture()
    assert step(prepared, None).shape == (2, 4)


def test_captures_that_fail_in_part_are_no_error() -> None:
    prepared = prepared_for(kept)
    prepared.backend.options = ReplayOptions(failing_captures=frozenset({1}))  # type: ignore[attr-defined]
    prepared.capture()
    assert len(prepared.recordings()) == 1
