"""Capture sizes that follow the traffic while steps are served."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from piecegraph import GraphMode

from .conftest import LiveServed

SIZES = (2, 4, 8, 16)


def tokens_of(it: LiveServed) -> list[int]:
    entries = it.prepared.dispatcher.plan.entries
    return sorted({entries[index].descriptor.num_tokens for index in it.captured()})


@pytest.mark.parametrize("strategy", ["eager", "delayed", "lazy"])
def test_new_sizes_are_captured_between_steps(
    serve: Callable[..., LiveServed], strategy: str
) -> None:
    it = serve(sizes=SIZES, strategy=strategy)
    it.prepared.capture()
    it.prepared.seal()
    for _ in range(40):
        it.step(5, 4)
        it.step(*[1] * 5)
    change = it.prepared.refit()
    assert len(change.sizes) <= len(SIZES)
    assert change.add
    assert change.cost_after < change.cost_before
    assert not set(change.drop) & set(tokens_of(it))
    ran = [(it.step(5, 4), it.step(*[1] * 5)) for _ in range(12)][-1]
    assert sum(int(each.split()[1]) for each in ran) < 16 + 8  # what they took before
    assert set(tokens_of(it)) <= set(change.sizes)
    assert it.prepared.refit().add == ()  # nothing more to gain


def test_the_start_comes_back_with_its_traffic(serve: Callable[..., LiveServed]) -> None:
    """Indices of graphs never change, and a size that returns has its index again."""
    it = serve(sizes=SIZES, mode=GraphMode.PIECEWISE)
    it.prepared.capture()
    entries = it.prepared.dispatcher.plan.entries
    for _ in range(40):
        it.step(4, 5)
    changed = it.prepared.refit()
    assert changed.add
    assert it.step(4, 5) == f"PIECEWISE {min(n for n in changed.sizes if n >= 9)}"
    assert it.prepared.dispatcher.plan.entries[: len(entries)] == entries
    for length in (2, 4, 8) * 40:
        it.step(length)
    back = it.prepared.refit()
    assert back.sizes == SIZES
    for length in (2, 4, 8, 2, 4, 8):
        it.step(length)
    assert [it.step(length) for length in (2, 4, 8)] == [f"PIECEWISE {n}" for n in (2, 4, 8)]
    rows = it.prepared.usage.rows()
    assert sum(row["count"] for row in rows) == 40 + 1 + 120 + 6 + 3
    total = len(it.prepared.dispatcher.plan.entries)
    it.prepared.release()
    it.prepared.capture()
    assert len(it.prepared.dispatcher.plan.entries) == total
    assert tokens_of(it) == sorted(back.sizes)


def test_a_model_without_graphs_has_nothing_to_refit(serve: Callable[..., LiveServed]) -> None:
    it = serve(mode=GraphMode.NONE)
    it.step(3)
    change = it.prepared.refit()
    assert (change.sizes, change.add, change.drop) == ((), (), ())
