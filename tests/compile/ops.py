"""Custom ops of the tests: splitting ops with each calling convention, without state."""

from __future__ import annotations

from typing import Any

import torch

LIBRARY: Any = torch.library.Library("piecegraph_test", "DEF")  # type: ignore[no-untyped-call]


def define(schema: str, run: Any, fake: Any) -> None:
    """Register op `piecegraph_test::<name>` with one kernel for all devices and its shapes."""
    LIBRARY.define(schema)
    name = schema.partition("(")[0].partition(".")[0]
    overload = schema.partition("(")[0]
    LIBRARY.impl(overload, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"piecegraph_test::{overload}", fake, lib=LIBRARY)
    assert hasattr(torch.ops.piecegraph_test, name)


def _mix_into(x: torch.Tensor, out: torch.Tensor, layer: str) -> None:
    out.copy_(_mix(x.flatten(1)).view_as(x))


def _bump(state: torch.Tensor, x: torch.Tensor) -> None:
    state.add_(x.sum())


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Rows see all rows before them, as attention's do."""
    return x.cumsum(0) / torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None]


define(
    "mix(Tensor x, Tensor(a!) out, str layer) -> ()",
    _mix_into,
    lambda x, out, layer: None,
)
define(
    "fresh(Tensor x, str layer) -> Tensor",
    lambda x, layer: _mix(x.flatten(1)).view_as(x).contiguous(),
    lambda x, layer: torch.empty_like(x),
)
define(
    "pair(Tensor x, SymInt[] sizes, *, float scale=1.0) -> (Tensor, Tensor)",
    lambda x, sizes, *, scale=1.0: (x * scale, _mix(x.reshape(sizes)).view_as(x)),
    lambda x, sizes, *, scale=1.0: (torch.empty_like(x), torch.empty_like(x)),
)
define(
    "log.tagged(Tensor x, *, str tag) -> Tensor",
    lambda x, *, tag: x + len(tag),
    lambda x, *, tag: torch.empty_like(x),
)
define(
    "bump(Tensor(a!) state, Tensor x) -> ()",
    _bump,
    lambda state, x: None,
)


def _scan(value: torch.Tensor, decay: torch.Tensor, layer: str) -> torch.Tensor:
    """A linear recurrence over tokens: state = decay * state + value."""
    state = torch.zeros_like(value[0])
    rows = []
    for row in value:
        state = decay * state + row
        rows.append(state)
    return torch.stack(rows)


define(
    "scan(Tensor value, Tensor decay, str layer) -> Tensor",
    _scan,
    lambda value, decay, layer: value.new_empty(value.shape),
)


def _turn(query: torch.Tensor, key: torch.Tensor) -> None:
    query.mul_(3)
    key.neg_()


define("turn(Tensor(a!) query, Tensor(b!) key) -> ()", _turn, lambda query, key: None)


def _accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total.add_(x)


define("accumulate(Tensor(a!) total, Tensor x) -> ()", _accumulate, lambda total, x: None)
