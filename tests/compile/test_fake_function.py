"""The fake implementation of an op is the user's function, also where torch wraps it."""

import torch

from piecegraph.compile.conditions.custom_ops import op_signature
from piecegraph.torch_compat.basics.ops import fake_function

LIBRARY = torch.library.Library("fake_function_test", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")


def fake(x):
    return torch.empty_like(x)


torch.library.register_fake("fake_function_test::twice", fake, lib=LIBRARY)


def test_an_op_has_the_same_form_before_and_after_its_first_call():
    assert fake_function("fake_function_test::twice") is fake
    before = op_signature(torch.ops.fake_function_test.twice)
    torch.ops.fake_function_test.twice(torch.empty(2, device="meta"))
    assert op_signature(torch.ops.fake_function_test.twice) == before
