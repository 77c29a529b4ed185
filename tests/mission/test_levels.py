"""Optimization levels. From vLLM's `-O0` to `-O3`."""

import pytest

from .conftest import mode_of

EXPECTED = {0: "NONE", 1: "PIECEWISE", 2: "FULL_AND_PIECEWISE", 3: "FULL_AND_PIECEWISE"}


@pytest.mark.parametrize("level", EXPECTED)
def test_a_level_sets_defaults(prepare, level):
    """vLLM: `OptimizationLevel`."""
    prepared = prepare(level=level)
    assert prepared.report()["graph_mode"]["resolved"] == EXPECTED[level]
    assert mode_of(prepared, 3, False).startswith("NONE")


def test_what_is_stated_wins_over_the_level(prepare):
    """vLLM: explicit settings override the level."""
    mode = prepare(level=0, graph_mode="PIECEWISE").report()["graph_mode"]
    assert mode["resolved"] == "PIECEWISE"
