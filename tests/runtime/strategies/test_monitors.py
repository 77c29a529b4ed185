"""After seal(), each kind of compile or capture that a CPU can provoke is seen, with its place."""

import logging
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

from piecegraph import Batch, Config, compile_ahead
from piecegraph.compile import ahead
from piecegraph.errors import WorkAfterSeal
from piecegraph.runtime.backends.replay.backend import ReplayBackend
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session
from piecegraph.runtime.core.allowed_work import allow_compilation
from piecegraph.torch_compat.basics.structured_trace import TRACE_LOGGER
from tests.processes import in_a_thread

from .conftest import call_in_steps


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def sealed(make):
    def make_sealed(after_seal="log", sizes=(8,), **settings):
        served = make(sizes, steps={"after_seal": after_seal}, **settings).capture()
        served.prepared.seal()
        made.append(served)
        return served

    made = []
    yield make_sealed
    for served in made:
        served.prepared.close()


def kinds(served):
    return [event.facts["kind"] for event in served.prepared.events.named("after_seal")]


def late(x):
    return x * 2 + 1


def compiled_late():
    """What traces `late` at its first call, and at one of another size."""
    return torch.compile(late, backend="eager", dynamic=False)


def test_a_trace_and_a_recompile_are_reported_with_what_was_traced(sealed):
    served = sealed()
    compiled = compiled_late()
    for size in (2, 3, 3):
        compiled(torch.ones(size))
    assert kinds(served) == ["Dynamo trace", "Dynamo recompile"]
    facts = served.prepared.events.named("after_seal")[0].facts
    assert "late" in facts["detail"]
    assert facts["shape"] == "no step"
    assert any("test_monitors.py" in line for line in facts["stack"])


@pytest.mark.compile
def test_an_inductor_compile_is_reported(sealed, monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is cached there
    served = sealed()
    torch.compile(lambda x: x @ x)(torch.ones(2, 2))  # without generated C++
    assert kinds(served) == ["Dynamo trace", "Inductor compile"]


def test_in_a_step_the_shape_is_reported(sealed):
    served = sealed()
    call_in_steps(served, compiled_late())
    served.check(Batch(11, 1))
    assert served.prepared.events.named("after_seal")[0].facts["shape"] == "11 tokens in NONE"


def test_raising_stops_the_compile_and_names_the_line(sealed):
    served = sealed("raise_all")
    compiled = compiled_late()
    with pytest.raises(Exception, match=r"Dynamo trace after seal\(\).*test_monitors.py") as caught:
        compiled(torch.ones(2))
    causes = [caught.value, caught.value.__cause__, caught.value.__context__]
    assert any(isinstance(cause, WorkAfterSeal) for cause in causes)
    assert served.prepared.events.counters["after_seal.trace"] == 1
    assert served.decode(3) == "FULL 8"


def test_what_compiles_outside_of_steps_ends_no_server(sealed):
    """An engine's helper that traces at its first use: it is counted and logged."""
    served = sealed("raise")
    compiled_late()(torch.ones(2))
    assert kinds(served) == ["Dynamo trace"]
    call_in_steps(served, torch.compile(lambda x: x * 3, backend="eager"))
    with pytest.raises(Exception, match=r"Dynamo trace after seal\(\).*in a step of 11 tokens"):
        served.check(Batch(11, 1))


def test_counting_only_counts(sealed):
    served = sealed("count")
    compiled_late()(torch.ones(2))
    assert kinds(served) == []
    assert served.prepared.events.counters["after_seal.trace"] == 1


def autotune(name):
    """What torch's autotuners do around their benchmarks."""
    from torch._dynamo.utils import dynamo_timed

    with dynamo_timed(name, log_pt2_compile_event=True):
        pass


@pytest.mark.parametrize(
    "span", ["CachingAutotuner.benchmark_all_configs", "mm_template_autotuning"]
)
def test_autotuning_is_reported(sealed, span):
    served = sealed()
    autotune(span)
    autotune("something_else")
    assert kinds(served) == ["autotuning"]


def test_a_triton_compile_is_reported_also_to_earlier_listeners(sealed, monkeypatch):
    triton = pytest.importorskip("triton")
    heard = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **facts: heard.append(facts["cache_hit"])
    )
    served = sealed()
    source = type("Source", (), {"name": "late_kernel"})
    for hit in (True, False):
        triton.knobs.compilation.listener(src=source, cache_hit=hit, metadata={})
    assert kinds(served) == ["Triton compile"]
    assert served.prepared.events.named("after_seal")[0].facts["detail"] == "kernel late_kernel"
    assert heard == [True, False]
    served.prepared.close()
    assert triton.knobs.compilation.listener.__name__ == "<lambda>"


@pytest.mark.compile
def test_a_kernel_compiled_by_triton_is_reported(sealed, monkeypatch, tmp_path):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    served = sealed()
    source = ASTSource(fn=triton.jit(kernel), signature={"x": "*fp32"}, constexprs={})
    triton.compile(source, target=GPUTarget("cuda", 80, 32))
    assert kinds(served) == ["Triton compile"]


def kernel(x):
    pass


def test_failure_6_an_unplanned_capture_is_reported(sealed):
    served = sealed("raise")
    events, backend = served.prepared.events, served.backend
    with pytest.raises(WorkAfterSeal, match="unplanned capture"):
        with capture_session(backend, backend.new_pool(), events) as session:
            record(late, (torch.ones(2),), session, name="stray", breaks=False)


def test_captures_of_the_strategy_are_planned(sealed):
    assert sealed("raise", sizes=(2, 8), strategy="lazy").decode(2) == "FULL 2"


def while_another_model_is_prepared(compile_it, monkeypatch):
    with allow_compilation():
        compile_it()


def in_another_thread(compile_it, monkeypatch):
    in_a_thread(compile_it)


def ahead_of_time(compile_it, monkeypatch):
    monkeypatch.setattr(ahead, "compile_ahead", lambda request: bool(compile_it().any()))
    assert compile_ahead(torch.nn.Linear(2, 2), Config(cache=False))


@pytest.mark.parametrize(
    "where", [while_another_model_is_prepared, in_another_thread, ahead_of_time]
)
def test_what_is_meant_or_not_this_models_business_is_not_reported(sealed, monkeypatch, where):
    served, compiled = sealed("raise_all"), compiled_late()
    where(lambda: compiled(torch.ones(2)), monkeypatch)
    assert kinds(served) == []


def test_release_stops_watching(sealed):
    served = sealed("raise_all")
    handlers = len(logging.getLogger(TRACE_LOGGER).handlers)
    served.prepared.seal()
    assert len(logging.getLogger(TRACE_LOGGER).handlers) == handlers
    served.prepared.release()
    assert len(logging.getLogger(TRACE_LOGGER).handlers) == handlers - 1
    compiled_late()(torch.ones(2))
    assert kinds(served) == []


@pytest.fixture
def triton(monkeypatch):
    """The part of Triton that a monitor uses, and a compile that is reported to it."""
    compilation = SimpleNamespace(listener=None)
    knobs = SimpleNamespace(compilation=compilation)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(knobs=knobs))

    def compile_late():
        if compilation.listener is not None:
            compilation.listener(src=SimpleNamespace(name="late_kernel"), cache_hit=False)

    return SimpleNamespace(compilation=compilation, compile=compile_late)


def test_models_may_be_sealed_and_released_in_any_order(triton, sealed):
    first, second = sealed(), sealed()
    first.prepared.release()
    triton.compile()
    assert (len(kinds(first)), len(kinds(second))) == (0, 1)
    first.prepared.seal()
    triton.compile()
    assert (len(kinds(first)), len(kinds(second))) == (1, 2)
    second.prepared.release()
    first.prepared.release()
    triton.compile()
    assert (len(kinds(first)), len(kinds(second))) == (1, 2)
    assert triton.compilation.listener is None


class StrayGraph:
    """Stands in for torch.cuda.CUDAGraph."""

    def __init__(self):
        self.begun = []

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.begun.append((pool, capture_error_mode))


def test_failure_6_a_stray_cuda_graph_is_reported(sealed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", StrayGraph)
    own, graph = StrayGraph.capture_begin, StrayGraph()
    logging, raising = sealed(), sealed("raise")
    with pytest.raises(WorkAfterSeal, match="unplanned capture"):
        graph.capture_begin()
    assert graph.begun == []
    raising.prepared.release()
    with allow_compilation():
        graph.capture_begin()
    graph.capture_begin((0, 1), capture_error_mode="relaxed")
    assert graph.begun == [(None, "global"), ((0, 1), "relaxed")]
    assert kinds(logging) == ["unplanned capture"]
    logging.prepared.release()
    assert StrayGraph.capture_begin is own


@pytest.mark.parametrize("strategy", ["eager", "delayed", "lazy"])
def test_a_dropped_model_is_not_watched_for_and_frees_its_layers(make, strategy):
    served = make((8,), steps={"after_seal": "raise"}, strategy=strategy)
    handlers = logging.getLogger(TRACE_LOGGER).handlers[:]
    begin = ReplayBackend.begin
    prepared = served.prepared
    prepared.capture()
    prepared.seal()
    layer, model = weakref.ref(prepared._core.steps.context.layers["scale"]), weakref.ref(prepared)
    del prepared, served
    assert model() is None
    assert layer() is None
    assert logging.getLogger(TRACE_LOGGER).handlers == handlers
    assert ReplayBackend.begin is begin
    compiled_late()(torch.ones(2))
