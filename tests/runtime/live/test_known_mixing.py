"""What a start has found of padding the next one of the same code and weights knows."""

import sys
import threading
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from piecegraph import Events, compile_ahead, prepare
from piecegraph.cache import Cache, Entry
from piecegraph.runtime.parts.proof import row_mixing, row_trials
from piecegraph.runtime.parts.proof.row_mixing import find_mixed_rows, keep_beside_steps
from piecegraph.runtime.parts.proof.row_trials import Trials
from tests.text_compiler import use_text_compiler

from ..conftest import right_step, small_config
from .conftest import HIDDEN, MixesRows, Model

compile_ahead_module = sys.modules[compile_ahead.__module__]


@pytest.fixture
def looked(monkeypatch):
    """The sizes in tokens of each look at a model."""
    asked = []

    def look(compiled, device, **asks):
        asked.append(sorted(asks["captured"]))
        return find_mixed_rows(compiled, device, **asks)

    monkeypatch.setattr(row_mixing, "find_mixed_rows", look)
    return asked


@pytest.fixture
def start(prepare_live):
    def start(model, **settings):
        torch.manual_seed(0)
        served = prepare_live(model(), **settings)
        found = served.prepared.report()["rows_mixed"]
        assert len(found) == (model is MixesRows)
        served.step(3)
        return found

    return start


@pytest.fixture(scope="module")
def twice_op(temporary_op):
    schema = "(Tensor x) -> Tensor"
    return temporary_op("known_mixing::twice", schema, lambda x: x * 2, fake=torch.empty_like)


@pytest.mark.parametrize("model", [Model, MixesRows])
def test_the_next_start_knows(start, looked, model):
    found = start(model)
    assert looked
    looked.clear()
    assert start(model) == found
    assert looked == []
    assert start(model, capture_sizes=(3, 8)) == found
    assert looked == [[3, 8]]


@pytest.mark.parametrize("meta", [{}, {"found": [1]}, {"found": [{"rows": 2}]}, {"found": 3}])
def test_what_another_version_has_written_is_looked_for_again(start, looked, monkeypatch, meta):
    found = start(MixesRows)
    monkeypatch.setattr(Cache, "lookup", with_meta(Cache.lookup, meta))
    looked.clear()
    assert start(MixesRows) == found
    assert looked


def with_meta(lookup, meta):
    def changed(cache, kind, key, **options):
        entry = lookup(cache, kind, key, **options)
        if kind != row_mixing.KNOWN or not isinstance(entry, Entry):
            return entry
        return replace(entry, manifest=replace(entry.manifest, meta=meta))

    return changed


def test_other_weights_are_looked_at(prepare_live, looked):
    torch.manual_seed(0)
    prepare_live(Model())
    looked.clear()
    prepare_live(Model())
    assert looked


@pytest.mark.parametrize("row", [0, 3, HIDDEN - 1])
def test_weights_of_which_one_element_differs_are_looked_at(prepare_live, looked, row):
    model = Model()
    prepare_live(model)
    looked.clear()
    model.layers[1].weight[row] += 1
    prepare_live(model)
    assert looked


class Masked(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.eye(16 * HIDDEN))

    def forward(self, x):
        return super().forward(x) @ self.mask[:HIDDEN, :HIDDEN]


def test_buffers_of_which_any_element_differs_are_looked_at(prepare_live, looked):
    model = Masked()
    prepare_live(model)
    looked.clear()
    prepare_live(model)
    assert not looked
    model.mask[0, 1] = 1
    prepare_live(model)
    assert looked


def test_kernels_of_others_are_looked_at_by_each_start(start, looked, twice_op):
    for _ in range(2):
        looked.clear()
        start(CallsAKernel)
        assert looked


def test_what_could_not_run_is_tried_again(start, looked, monkeypatch):
    def fails(compiled, device, **asks):
        looked.append(1)
        return ["piece 0 cannot be run alone: no memory"]

    monkeypatch.setattr(row_mixing, "find_mixed_rows", fails)
    start(Model)
    looked.clear()
    start(Model)
    assert looked


@pytest.fixture
def config(tmp_path):
    made = {"codegen": {"sizes": (4,)}, "cache": True, "cache_dir": tmp_path}
    inputs = {"input": "float32[num_tokens, 4]"}
    return small_config(16, inputs=inputs, capture_sizes=(2, 4), compiler="inductor", **made)


def test_compile_ahead_knows_what_padding_reaches(config, looked, monkeypatch):
    use_text_compiler(monkeypatch)
    model, config = torch.nn.Softsign(), config.changed(compiler="text")

    def build(model, config, *_):
        prepare(model, config.changed(graph_mode="NONE")).close()
        return True

    monkeypatch.setattr(compile_ahead_module, "build_libraries", build)
    assert compile_ahead(model, config)
    assert looked == [[2, 4]]
    prepare(model, config).close()
    assert looked == [[2, 4]]


@pytest.mark.heavy
def test_compile_ahead_builds_what_the_next_start_loads(config, looked):
    """Code of one size has a library, too, and what padding reaches is known."""
    model, events = torch.nn.Softsign(), Events()
    assert compile_ahead(model, config, events=events)
    built = [span for span in events.spans if span.name == "compile.library"]
    assert (len(built), events.named("compile.library_failed")) == (2, [])
    assert looked == [[2, 4]]
    looked.clear()
    prepared = prepare(model, config, events=events)
    assert looked == []
    assert [span for span in events.spans if span.name == "bundle.libraries"]
    for size in (4, 7):
        right_step(prepared, model, torch.randn(size, 4))
    prepared.close()


class Draws(Model):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5, True))


class Writes(Model):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(HIDDEN))

    def forward(self, x):
        self.seen.add_(1)
        return super().forward(x)


class CallsAKernel(Model):
    def forward(self, x):
        return torch.ops.known_mixing.twice(super().forward(x))


@pytest.mark.parametrize("model", [Model, MixesRows, Draws, Writes, CallsAKernel])
def test_the_switch_looks_only_for_what_a_thread_may_not_run(
    serve_cold, looked, monkeypatch, twice_op, model
):
    """Steps beside the thread would draw other random numbers, or lose what they write."""
    threads = []

    def run(*args, **named):
        threads.append(threading.current_thread() is threading.main_thread())
        assert threads[-1] or not seeded
        return ran(*args, **named)

    ran, seeded = Trials._run, []
    monkeypatch.setattr(Trials, "_run", run)
    monkeypatch.setattr(
        row_trials, "_seeded", lambda device: seeded.append(device) or nullcontext()
    )
    torch.manual_seed(0)
    served = serve_cold(model())
    assert served.prepared.wait_until_compiled(60)
    only_computes = model in (Model, MixesRows)
    assert set(threads) == {not only_computes}
    assert bool(seeded) != only_computes
    if only_computes:
        assert len(served.prepared.report()["rows_mixed"]) == (model is MixesRows)


@pytest.mark.parametrize("beside", [True, False])
def test_compile_ahead_runs_beside_steps_only_what_computes(
    prepare_live, looked, monkeypatch, beside
):
    monkeypatch.setattr(compile_ahead_module, "build_libraries", lambda *_: True)
    for model in (Model(), Draws()):
        config = prepare_live(model).prepared.config
        given = (model, config.changed(capture_sizes=(3, 8)))
        looked.clear()
        if beside:
            thread = threading.Thread(target=compile_ahead, args=given)
            thread.start()
            thread.join()
        else:
            assert compile_ahead(*given)
        assert bool(looked) == (isinstance(model, Draws) <= (not beside))


def test_a_device_is_left_to_the_steps_beside(prepare_live, looked):
    prepared = prepare_live(Model()).prepared
    looked.clear()
    for device in ("cuda", "cpu"):
        given = prepared._core.environment.cache, prepared.compiled, torch.device(device)
        sizes = {"captured": {3, 8}, "size": "num_tokens", "sentinels": {}, "forward": None}
        keep_beside_steps(*given, **sizes)
        assert bool(looked) == (device == "cpu")
