"""When graphs are captured. From vLLM's startup captures, delayed and lazy captures of peers."""

import pytest

from .conftest import mode_of


def test_all_at_startup(prepare):
    """vLLM: `capture_model`."""
    prepared = prepare(strategy="eager")
    prepared.capture(None)
    assert len(prepared.recordings()) == len(prepared.dispatcher.plan.entries)


@pytest.mark.parametrize("strategy", ["delayed", "lazy"])
def test_between_steps_as_they_are_wanted(prepare, strategy):
    """Delayed capture: a few graphs a step. Lazy: on first use."""
    prepared = prepare(strategy=strategy)
    prepared.capture(None)
    assert len(prepared.recordings()) < len(prepared.dispatcher.plan.entries)
    for _ in range(8):
        used = mode_of(prepared, 3, True)
    assert used == "FULL 4"


def test_while_the_engine_is_idle(prepare):
    """piecegraph: `capture_idle`."""
    prepared = prepare(strategy="delayed")
    prepared.capture(None)
    mode_of(prepared, 3, True)
    prepared.capture_idle(1000.0)
    assert mode_of(prepared, 3, True) == "FULL 4"


def test_within_a_memory_limit(prepare):
    """Gaudi: a budget of memory for graphs."""
    prepared = prepare(steps={"memory_limit": 1})
    prepared.capture(None)
    assert len(prepared.recordings()) < len(prepared.dispatcher.plan.entries)
