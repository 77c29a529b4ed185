"""Models whose forward is wrapped: hooks, decorators, replaced forwards, torch.compile."""

import functools

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, prepare

from .models import X, assert_right

pytestmark = pytest.mark.compile


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x, scale=2.0):
        return self.linear(x) * scale


def traced_call(cls):
    """Replaces `__call__`, as engines do that compile a class's forward."""
    original = cls.__call__

    def __call__(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    cls.__call__ = __call__
    return cls


@traced_call
class Decorated(Plain):
    pass


def with_hook(shift=1.0):
    model = Plain()
    model.register_forward_hook(lambda module, args, result: result + shift)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    return model


def with_lambda():
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x) + 1
    return model


def with_partial():
    model = Plain()
    model.forward = functools.partial(model.forward, scale=3.0)
    return model


def with_hook_of_accelerate():
    """As accelerate's add_hook_to_module: a partial of a new forward of the module."""
    model = Plain()
    old = model.forward

    def new_forward(module, *args, **kwargs):
        return old(*args, **kwargs) * 0.5

    wrapped = functools.update_wrapper(functools.partial(new_forward, model), old)
    model.forward = wrapped
    return model


@pytest.mark.parametrize(
    "make", [Decorated, with_hook, with_lambda, with_partial, with_hook_of_accelerate]
)
def test_wrapped_model_is_served_as_it_is_called(compiled, make):
    model = make()
    made = compiled(model, inputs=X)
    assert_right(made, model, (1, 5, 64))


def test_model_of_torch_compile_is_unwrapped():
    model = Plain()
    config = Config(inputs=X, compiler="eager", graph_mode="NONE", cache=False, max_num_tokens=64)
    served = prepare(torch.compile(model), config)
    x = torch.randn(5, 8)
    torch.testing.assert_close(served(x, batch=Batch(5, 1)), model(x).detach())
