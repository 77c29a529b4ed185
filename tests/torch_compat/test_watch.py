"""The hooks of equal layers in Dynamo."""

import inspect

import pytest
import torch

pytestmark = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch cannot move the place of a guard"
)


def test_all_hooks_are_in_place_inside_and_none_after():
    from piecegraph.torch_compat.faster.equal_layers.calls import Calls
    from piecegraph.torch_compat.faster.equal_layers.watch import _HOOKS, watched

    def attributes():
        return [inspect.getattr_static(owner, name) for owner, name, _ in _HOOKS]

    before = attributes()
    with watched(Calls(torch.nn.Module())):
        assert all(one is not other for one, other in zip(attributes(), before, strict=True))
    assert attributes() == before
