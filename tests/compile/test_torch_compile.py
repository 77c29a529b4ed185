"""`torch.compile(model, backend="piecegraph")`: pieces, cache, limits."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.errors import GradientsNeeded, InvalidSetting, PieceFailed
from piecegraph.runtime import torch_compile

from .models import MIX, Products, Stack

pytestmark = pytest.mark.compile


class Model(Stack):
    """A result, and a number."""

    def forward(self, x):
        return super().forward(x) * x.shape[0], x.shape[0] + 1


@pytest.fixture(autouse=True)
def dynamo_reset():
    yield
    torch.compiler.reset()


def compiled(model, **options):
    events = pg.Events()
    options = {"splitting_ops": MIX, "events": events, "cache": False} | options
    return torch.compile(model, backend="piecegraph", dynamic=True, options=options), events


@torch.no_grad()
def test_pieces_are_shared_and_sizes_dynamic():
    model = Model()
    fast, events = compiled(model, compiler="eager")
    for size in (3, 5, 17):
        x = torch.randn(size, 8)
        result, number = fast(x)
        torch.testing.assert_close(result, model(x)[0])
        assert number == size + 1
    (split,) = events.named("split")
    assert (split.facts["pieces"], split.facts["unique"]) == (4, 3)


@torch.no_grad()
def test_a_second_trace_compiles_nothing(tmp_path):
    """Inductor, over one cache directory: what `torch.compiler.reset` forgets, the cache has."""
    counts = []
    for _ in range(2):
        model = Products()
        settings = {"splitting_ops": ("piecegraph_test::fresh",), "cache": True}
        fast, events = compiled(model, cache_dir=tmp_path, **settings)
        x = torch.randn(6, 8)
        torch.testing.assert_close(fast(x), model(x))
        torch.testing.assert_close(fast(x[:4]), model(x[:4]))
        counts.append((events.counters["inductor_compiles"], len(events.named("split"))))
        torch.compiler.reset()
    assert counts == [(1, 1), (0, 1)]


@torch.no_grad()
def test_graphs_without_the_splitting_op_are_one_piece():
    fast, events = compiled(nn.Linear(8, 8), compiler="eager")
    fast(torch.randn(3, 8))
    assert events.named("split")[0].facts["pieces"] == 1


NUMBERS = [
    (lambda x, n: x * n + torch.sin(torch.arange(8) * n), (5, 7, 11, 0, -3)),
    (lambda x, n: nn.functional.pad(x, (n, n)).relu() * n, (2, 3, 5, 0)),
    (lambda x, n: torch.roll(x, n, 0)[: n + 9] + n, (-2, 3, -5)),
    (lambda x, n: (x.repeat(n, 1), n * 2, x.shape[0] - n), (2, 3, 4)),
    (lambda x, n: torch.arange(n) * n, (4, 7, 9)),
]


@torch.no_grad()
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_numbers_that_change_are_inputs(compiler, tmp_path):
    """No graph goes to torch's backend, each number gives its own result, and what the cache has
    does not hold for one number alone."""
    for function, numbers in NUMBERS if compiler == "eager" else NUMBERS[:1]:
        for order in (numbers, numbers[::-1]):
            options = {"compiler": compiler, "cache": True, "cache_dir": tmp_path, "strict": True}
            fast, events = compiled(function, **options)
            for n in order:
                x = torch.randn(6 + abs(n), 8)
                torch.testing.assert_close(fast(x, n), function(x, n))
            assert events.counters["backend.graphs"] == len(events.named("split")) > 0
            torch.compiler.reset()


@torch.no_grad()
def test_static_sizes():
    model = Model()
    options = {"splitting_ops": MIX, "compiler": "eager", "cache": False}
    fast = torch.compile(model, backend="piecegraph", dynamic=False, options=options)
    for size in (2, 3):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x)[0], model(x)[0])


def refusal(model, x, **options):
    fast, _ = compiled(model, compiler="eager", **options)
    with pytest.raises(Exception, match="piecegraph") as caught:
        fast(x)
    return getattr(caught.value, "inner_exception", caught.value)


def test_strict_refuses_gradients():
    assert isinstance(refusal(Model(), torch.randn(3, 8), strict=True), GradientsNeeded)
    fast, _ = compiled(Model().requires_grad_(False), compiler="eager", strict=True)
    fast(torch.randn(3, 8))


def test_training_goes_to_torchs_backend():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    fast, events = compiled(model, compiler="aot_eager")
    x = torch.randn(3, 8)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    actual = torch.autograd.grad(fast(x).sum(), list(model.parameters()))
    torch.testing.assert_close(actual, expected)
    (fallback,) = events.named("backend.fallback")
    assert "GradientsNeeded" in fallback.facts["reason"]
    assert events.counters["backend.fallbacks"] == 1


@torch.no_grad()
@pytest.mark.parametrize("error", [RuntimeError("ours"), PieceFailed])
def test_an_error_of_ours_is_a_fallback(monkeypatch, caplog, error):
    """Whatever fails, the graph runs as torch's backend compiles it, with one warning."""
    facts = {"compiler": "c", "piece": 0, "digest": "d", "reason": "broken"}
    raised = error if isinstance(error, RuntimeError) else error(**facts)

    def fails(request, guarded):
        guarded.trace.graph.graph.erase_node(guarded.trace.graph.graph.output_node())
        raise raised

    monkeypatch.setattr(torch_compile, "compile_trace", fails)
    model, warning = fallen_back(caplog)
    assert type(raised).__name__ in warning
    assert "tests/compile/models.py" in warning
    assert refusal(model, torch.randn(5, 8), strict=True) is raised


def fallen_back(caplog):
    """A model that is not compiled, once for two sizes, and the warning."""
    model = Model(2)
    fast, events = compiled(model, compiler="eager")
    for size in (3, 5):
        x = torch.randn(size, 8)
        torch.testing.assert_close(fast(x)[0], model(x)[0])
    assert events.counters["backend.fallbacks"] == 1
    (warning,) = [each for each in caplog.records if "backend.fallback" in each.message]
    return model, warning.message


def failing_in_calls(monkeypatch):
    compile_trace = torch_compile.compile_trace

    def compiled_badly(*args):
        def step(*tensors):
            raise PieceFailed(compiler="piecegraph", piece=0, digest="d", reason="broken")

        return SimpleNamespace(link=lambda: step, plan=compile_trace(*args).plan)

    monkeypatch.setattr(torch_compile, "compile_trace", compiled_badly)


@torch.no_grad()
def test_an_error_in_a_call_is_a_fallback_too(monkeypatch, caplog):
    failing_in_calls(monkeypatch)
    model, warning = fallen_back(caplog)
    assert "PieceFailed" in warning
    assert "fallbacks=1" in warning
    assert isinstance(refusal(model, torch.randn(5, 8), strict=True), PieceFailed)


@torch.no_grad()
def test_a_graph_that_writes_is_not_run_twice(monkeypatch):
    """An error of the program is its own, and a call that may have written is not repeated."""
    failing_in_calls(monkeypatch)
    with pytest.raises(PieceFailed):
        torch.compile(lambda x: x.add_(1), backend="piecegraph", options={"compiler": "eager"})(
            torch.zeros(3)
        )


@torch.no_grad()
def test_an_error_of_the_program_in_a_call_is_its_own():
    events = pg.Events()
    options = {"compiler": "eager", "cache": False, "events": events}
    fast = torch.compile(lambda x, i: x[i] * 2, backend="piecegraph", options=options)
    torch.testing.assert_close(fast(torch.ones(4), torch.tensor([1])), torch.full((1,), 2.0))
    with pytest.raises(IndexError):
        fast(torch.ones(4), torch.tensor([9]))
    assert not events.counters["backend.fallbacks"]


@torch.no_grad()
def test_settings_of_serving_are_refused():
    error = refusal(Model(), torch.randn(3, 8), max_num_reqs=4)
    assert isinstance(error, InvalidSetting)
    assert "max_num_reqs" in str(error)


@torch.no_grad()
def test_autocast_is_kept(tmp_path):
    def mixed(x, weight):
        with torch.autocast("cpu", torch.bfloat16):
            return x @ weight

    compiles = []
    for _ in range(2):
        x, weight = torch.randn(3, 8), torch.randn(8, 8)
        fast, events = compiled(mixed, splitting_ops=(), cache=True, cache_dir=tmp_path)
        torch.testing.assert_close(fast(x, weight), mixed(x, weight))
        assert not events.named("artifact.not_kept")
        compiles.append(events.counters["inductor_compiles"])
        torch.compiler.reset()
    assert compiles == [1, 0]


@torch.no_grad()
def test_what_is_not_kept_is_an_event(tmp_path):
    uncached = {"codegen.inductor_options": {"force_disable_caches": True}}
    fast, events = compiled(lambda x: x @ x.T, cache=True, cache_dir=tmp_path, **uncached)
    fast(torch.randn(3, 8))
    (event,) = events.named("artifact.not_kept")
    assert event.facts["reason"] == "the compiler cannot serialize it"
