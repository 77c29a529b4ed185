"""Models whose forward is wrapped: hooks, decorators, replaced forwards, torch.compile."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, Config, prepare

from .models import X

pytestmark = pytest.mark.compile


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return self.linear(x) * scale


def traced_call(cls: type) -> type:
    """Replaces `__call__`, as engines do that compile a class's forward."""
    original = cls.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    cls.__call__ = __call__  # type: ignore[method-assign]
    return cls


@traced_call
class Decorated(Plain):
    pass


def with_hook(shift: float = 1.0) -> nn.Module:
    model = Plain()
    model.register_forward_hook(lambda module, args, result: result + shift)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    return model


def with_lambda() -> nn.Module:
    model = Plain()
    forward = model.forward
    model.forward = lambda x: forward(x) + 1  # type: ignore[method-assign, assignment]
    return model


def with_partial() -> nn.Module:
    model = Plain()
    model.forward = functools.partial(model.forward, scale=3.0)  # type: ignore[method-assign]
    return model


def with_hook_of_accelerate() -> nn.Module:
    """As accelerate's add_hook_to_module: a partial of a new forward of the module."""
    model = Plain()
    old = model.forward

    def new_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return old(*args, **kwargs) * 0.5

    wrapped = functools.update_wrapper(functools.partial(new_forward, model), old)
    model.forward = wrapped  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    "make", [Decorated, with_hook, with_lambda, with_partial, with_hook_of_accelerate]
)
def test_wrapped_model_is_served_as_it_is_called(compiled, make):
    model = make()
    made = compiled(model, inputs=X)
    for size in (1, 5, 64):
        x = torch.randn(size, 8)
        torch.testing.assert_close(made(x), model(x).detach())


def test_model_of_torch_compile_is_unwrapped():
    model = Plain()
    config = Config(inputs=X, compiler="eager", graph_mode="NONE", cache=False, max_num_tokens=64)
    served = prepare(torch.compile(model), config)
    x = torch.randn(5, 8)
    torch.testing.assert_close(served(x, batch=Batch(5, 1)), model(x).detach())
