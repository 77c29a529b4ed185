"""No stale result: for all that a model reads, a changed value is a miss, an equal one a hit."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest

from ...goldens.test_goldens import TRACED_BY, expect_equal
from .outcomes import CASES, one_of_each, outcomes

GOLDEN = (Path(__file__).parents[2] / "goldens" / "conditions.txt").read_text()
NOT_TRACED = {
    "attribute_float_subclass": "builtin operator `float`",
    "handled_in_tensors": "object has no attribute 'pg_gain'",
    "hash_of_a_string": "builtin operator `hash`",
    "set_of_a_set_of_strings": "AssertionError",
    "set_popped": "AssertionError",
    "setting_that_dynamo_guards": "op returned non-Tensor",
}
"""Cases that Dynamo 2.11 cannot trace, and a word of the error, which has the line."""
WRONG_IN_TORCH = {"class_attribute_that_is_held"}
"""Cases that torch.compile alone gets wrong in 2.11: `is` of two places."""
NOT_ALONE = {"global_pre_hook"}
"""Their reason has a number that torch counts up in the process, so that cases before change it."""
SAMPLE = [name for name in one_of_each(GOLDEN.splitlines()) if name not in NOT_ALONE]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize(
    "names",
    [pytest.param(SAMPLE, id="sample"), pytest.param([*CASES], id="all", marks=pytest.mark.heavy)],
)
def test_each_case_comes_out_as_recorded(names):
    """`make test` tries one case of each kind of reason."""
    recorded = {line.partition(":")[0]: f"{line}\n" for line in GOLDEN.splitlines()}
    assert recorded.keys() == CASES.keys()
    lines = [f"{line}\n" for line in outcomes(names)]
    if version("torch").startswith(TRACED_BY):
        expect_equal("conditions.txt", "".join(recorded[n] for n in sorted(names)), "".join(lines))
        return
    for line in lines:  # reasons hold names of graphs
        name, _, outcome = line.partition(": ")
        if version("torch") < "2.12" and name in NOT_TRACED:
            assert outcome.startswith("error: TraceFailed"), line
            assert "case.py:" in outcome
            assert NOT_TRACED[name] in outcome
        elif version("torch") >= "2.12" or name not in WRONG_IN_TORCH:
            kind = recorded[name].partition(": ")[2].partition(":")[0]
            assert outcome.partition(":")[0] == kind, line
