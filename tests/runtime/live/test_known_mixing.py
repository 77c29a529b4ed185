"""What a start has found of padding the next one of the same code and weights knows."""

import sys
import threading

import pytest
import torch

from piecegraph import Batch, Config, Events, compile_ahead, prepare
from piecegraph.runtime.parts.proof import row_mixing
from piecegraph.runtime.parts.proof.row_mixing import find_mixed_rows

from .conftest import MixesRows, Model

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


@pytest.mark.parametrize("model", [Model, MixesRows])
def test_the_next_start_knows(start, looked, model):
    found = start(model)
    assert looked
    looked.clear()
    assert start(model) == found
    assert looked == []
    assert start(model, capture_sizes=(3, 8)) == found
    assert looked == [[3, 8]]


def test_other_weights_are_looked_at(prepare_live, looked):
    torch.manual_seed(0)
    prepare_live(Model())
    looked.clear()
    prepare_live(Model())
    assert looked


def test_kernels_of_others_are_looked_at_by_each_start(start, looked, temporary_op):
    schema = "(Tensor x) -> Tensor"
    temporary_op("known_mixing::twice", schema, lambda x: x * 2, fake=torch.empty_like)

    class CallsAKernel(Model):
        def forward(self, x):
            return torch.ops.known_mixing.twice(super().forward(x))

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


def test_compile_ahead_builds_what_the_next_start_loads(tmp_path, looked):
    """Code of one size has a library, too, and what padding reaches is known."""
    config = Config(
        inputs={"input": "float32[num_tokens, 4]"}, codegen={"sizes": (4,)}, max_num_tokens=16,
        max_num_reqs=16, capture_sizes=(2, 4), attention={"support": "ALWAYS"},
        graph_mode="FULL", cache_dir=tmp_path,
    )  # fmt: skip
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
        x = torch.randn(size, 4)
        torch.testing.assert_close(prepared(x, batch=Batch(size, size)), model(x))
    prepared.close()


@pytest.mark.parametrize("beside", [True, False])
def test_compile_ahead_runs_no_piece_beside_steps_of_another_thread(monkeypatch, beside):
    """It would draw from their generator, and write what the model keeps."""
    ran = []
    monkeypatch.setattr(compile_ahead_module, "build_libraries", lambda *_: True)
    monkeypatch.setattr(compile_ahead_module, "_look_at_padding", lambda *_: ran.append(1))
    given = (torch.nn.Linear(4, 4), Config(graph_mode="NONE"))
    if beside:
        thread = threading.Thread(target=compile_ahead, args=given)
        thread.start()
        thread.join()
    else:
        assert compile_ahead(*given)
    assert ran == [1] * (not beside)
