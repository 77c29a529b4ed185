"""Context managers around splitting ops: removed, entered again for each section, or refused."""

import pytest
import torch
from torch import nn

from piecegraph.compile.pieces.contexts import check_contexts
from piecegraph.errors import ContextSplit

from .models import MIX, Stack, X

pytestmark = pytest.mark.compile


class Inside(nn.Module):
    """`make()` is a context manager around attention and what is before and after it."""

    def __init__(self, make):
        super().__init__()
        self.stack = Stack(3)
        self.make = make

    def forward(self, x):
        with self.make():
            y = self.stack(x)
        return y * 2 + 1


class Decorated(Inside):
    @torch.inference_mode()
    def forward(self, x):
        return self.stack(x) * 2


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


CONTEXTS = [torch.inference_mode, torch.no_grad, torch.enable_grad, autocast]


@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.heavy)])
@pytest.mark.parametrize("make", [*CONTEXTS, None])
def test_context_around_splitting_ops(compiled, make, compiler):
    model = Decorated(None) if make is None else Inside(make)
    made = compiled(model, inputs=X, splitting_ops=MIX, compiler=compiler)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if make is autocast else {}
    for size in (1, 5, 64):
        x = torch.randn(size, 8)
        with torch.no_grad():
            expected = model(x)
        got = made(x)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected.clone(), **tolerance)
    assert not torch.is_grad_enabled() or not made(torch.randn(2, 8)).requires_grad


def test_equal_layers_in_autocast_stay_equal_pieces(compiled):
    made = compiled(Inside(autocast), inputs=X, splitting_ops=MIX)
    plain = compiled(Inside(torch.no_grad), inputs=X, splitting_ops=MIX)
    assert len(made.plan.pieces) == len(plain.plan.pieces)
    assert all(call.autocast is not None for call in made.plan.calls())


def test_splitting_op_runs_under_autocast(compiled):
    seen = []
    library = torch.library.Library("context_tests", "DEF")
    library.define("look(Tensor x) -> Tensor")

    def look(x):
        seen.append(torch.is_autocast_enabled("cpu"))
        return x.clone()

    library.impl("look", look, "CPU")
    torch.library.register_fake("context_tests::look", torch.empty_like, lib=library)

    class Looks(nn.Module):
        def forward(self, x):
            with autocast():
                y = torch.ops.context_tests.look(x * 2) @ x.T
                with torch.autocast("cpu", enabled=False):
                    y = torch.ops.context_tests.look(y)
            return torch.ops.context_tests.look(y)

    made = compiled(Looks(), inputs=X, splitting_ops=("context_tests::look",))
    made(torch.randn(5, 8))
    assert seen == [True, False, False]
    library._destroy()


def test_other_context_is_refused_with_its_line():
    graph = torch.fx.Graph()
    node = graph.call_function(torch.enable_grad, ())
    node.meta["stack_trace"] = f'File "{__file__}", line 7, in forward'
    with pytest.raises(ContextSplit, match=r"enable_grad.*test_contexts.py:7"):
        check_contexts([node])
