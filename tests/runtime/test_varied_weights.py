"""Which weights have other values in runs that look for rows that mix."""

import pytest
import torch
from torch.nn import Parameter

from piecegraph.runtime.parts.proof import varied_weights
from piecegraph.runtime.parts.proof.varied_weights import varied

TWOS = torch.full((8, 6), 2.0)


def with_value(value, *at):
    weight = TWOS.clone()
    weight[at] = value
    return weight


CASES = {
    "no zero": (Parameter(TWOS), False, False),
    "one zero": (Parameter(with_value(0.0, 3, 2)), True, False),
    "a row of zeros": (Parameter(with_value(0.0, 3)), True, True),
    "a column of ones": (Parameter(with_value(1.0, slice(None), 2)), True, True),
    "a gate": (Parameter(with_value(0.0, 3)[:, 0].clone()), True, True),
    "a mask": (with_value(0.0, 3), False, False),
    "a buffer of zeros": (torch.zeros(8, 6), True, False),
    "numbers": (torch.zeros(8, 6, dtype=torch.int64), False, False),
}


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_what_zeros_and_ones_may_hide(case, is_large, monkeypatch):
    """A copy of each large matrix with a zero somewhere would need as much memory as the model."""
    weight, *expected = CASES[case]
    monkeypatch.setattr(varied_weights, "WHOLE", 1 if is_large else 1 << 20)
    found = varied({"w": weight})
    assert ("w" in found) is expected[is_large]
    if found:
        kept = (weight != 0) & (weight != 1)
        assert torch.equal(found["w"][kept], weight[kept])
        assert not ((found["w"] == 0) | (found["w"] == 1)).any()
