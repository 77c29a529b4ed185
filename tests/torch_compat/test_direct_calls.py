"""Pieces are called without what torch has around their code, where that has nothing to do."""

from functools import wraps

import pytest
import torch
from torch.autograd import profiler
from torch.fx.experimental.proxy_tensor import make_fx

from piecegraph.compile.backends.inductor import compile_piece, compiling, load_pieces
from piecegraph.torch_compat.basics.tensors import fresh_fake_mode
from piecegraph.torch_compat.compiling.inductor import import_inductor
from piecegraph.torch_compat.compiling.partition import code_run_by
from piecegraph.torch_compat.faster.direct_calls import direct

pytestmark = pytest.mark.compile

X = torch.linspace(-1, 1, 16).view(4, 4)


def product(x):
    return [x @ x]


def written(x):
    return [x.add_(1) @ x]


def view_of_an_input(x):
    return [x.view(2, 8), x @ x]


def pieces(function):
    """The piece of `function` after its compile, and as it is loaded."""
    graph = make_fx(function)(X.clone())
    with fresh_fake_mode() as mode, compiling():
        built, blobs = compile_piece(graph, [mode.from_tensor(X)], {})()
    return built, *load_pieces([blobs])


@pytest.fixture
def entered(monkeypatch):
    """What was entered of what is around the code."""
    import_inductor()
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._inductor.output_code import CompiledFxGraph

    names = []

    def noting(name, function):
        @wraps(function)
        def call(*args, **kwargs):
            names.append(name)
            return function(*args, **kwargs)

        return call

    around = {"wrapper": runtime_wrappers.SerializableCompiledFunction, "graph": CompiledFxGraph}
    for name, kind in around.items():
        monkeypatch.setattr(kind, "__call__", noting(name, kind.__call__))
    return names


@torch.no_grad()
@pytest.mark.parametrize("function", [product, written, view_of_an_input])
def test_code_is_called_alone_from_the_second_call_on_if_the_rest_has_nothing_to_do(
    function, entered
):
    around = ["wrapper", "graph"]
    for piece in pieces(function):
        entered.clear()
        for then in (around, [] if function is product else around):
            x = X.clone()
            args = [x]
            expected = function(expected_x := X.clone())
            torch.testing.assert_close([*piece(args)], expected)
            torch.testing.assert_close(x, expected_x)
            assert entered == then
            assert args == [x]
            entered.clear()


def test_with_gradients_and_for_a_profiler_the_rest_is_called(entered):
    for piece in pieces(product):
        with torch.no_grad():
            piece([X])
            entered.clear()
            with profiler.profile() as profile:
                piece([X])
            assert entered == ["wrapper", "graph"]
            assert any("CompiledFxGraph" in event.name for event in profile.function_events)
        entered.clear()
        (result,) = piece([X.clone().requires_grad_()])
        assert entered == ["wrapper", "graph"]
        assert not result.requires_grad


@torch.no_grad()
def test_what_runs_the_code_instead_is_called():
    """As in a capture of partitions and of regions, also for pieces that are made inside of it."""
    seen = []

    def run(original, graph, args):
        seen.append(graph)
        return original(graph, args)

    _, loaded = pieces(product)
    loaded([X])
    with code_run_by(run):
        for piece in (loaded, *pieces(product)):
            seen.clear()
            for count in (1, 2):
                torch.testing.assert_close([*piece([X])], product(X))
                assert len(seen) == count
    seen.clear()
    loaded([X])
    assert not seen


@torch.no_grad()
def test_without_speed_ups_everything_is_called(entered, monkeypatch):
    monkeypatch.setenv("PIECEGRAPH_OFF", "faster")
    for piece in pieces(product):
        entered.clear()
        for _ in range(2):
            torch.testing.assert_close([*piece([X])], product(X))
        assert entered == 2 * ["wrapper", "graph"]


def test_an_artifact_of_another_form_is_called_as_it_is():
    assert direct(sorted, object()) is sorted
