"""Every backend in the same scenes, asked for nothing but what its protocol has."""

import pytest
import torch
from torch import nn

from piecegraph import (
    Batch,
    RuntimeMode,
    break_graph,
    get_forward_context,
    prepare,
)
from piecegraph.errors import CaptureFailed, CaptureOutOfMemory, WorkAfterSeal
from piecegraph.runtime.backends.protocol import Capture, Graph, GraphBackend
from piecegraph.runtime.backends.registry import choose_backend
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions

from .conftest import make_rig, small_config, strict_backend
from .fake_device import FakeBackend


class Only:
    """An object of which nothing but the members of `protocol` can be read."""

    def __init__(self, protocol, held):
        self._members = {*vars(protocol), *protocol.__annotations__}
        self._held = held

    def __getattr__(self, name):
        assert name in self._members, f"the protocol has no {name!r}"
        return getattr(self._held, name)

    def begin(self, *args):
        return Only(Capture, self._held.begin(*args))

    def end(self, **how):
        return Only(Graph, self._held.end(**how))


DELAYED = {"delay": True, "fail_on_early_writes": True, "poison_old_results": True}
BACKENDS = {
    "replay": strict_backend,
    "delayed": lambda: strict_backend(**DELAYED),
    "fake": FakeBackend,
    "cuda": lambda: choose_backend("cuda", torch.device("cuda")),
}


@pytest.fixture(params=[*list(BACKENDS)[:3], pytest.param("cuda", marks=pytest.mark.gpu)])
def scene(request):
    backend = Only(GraphBackend, BACKENDS[request.param]())
    with torch.no_grad():
        yield make_rig(backend, "cuda" if request.param == "cuda" else "cpu")
    backend.synchronize()


@break_graph
def attend(query, out):
    context = get_forward_context()
    cache = context.layers["cache"]
    cache.index_copy_(0, context.metadata[: len(query)], query)
    out.copy_(cache.index_select(0, context.metadata[: len(query)]) * 2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4), requires_grad=False)

    def forward(self, x):
        query = x * self.weight
        out = torch.empty_like(query)
        attend(query, out)
        return out + query


def served(scene):
    """A model with one slot for each token, the slots, and its metadata."""
    model, cache = Model().to(scene.device), torch.zeros(9, 4, device=scene.device)
    config = small_config(
        compile=False,
        capture_sizes=(4, 8),
        graph_mode="FULL_AND_PIECEWISE",
        attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
        steps={"after_seal": "raise"},
    )
    prepared = prepare(model, config, backend=scene.backend, layers={"cache": cache})
    slots = torch.full((8,), 8, device=scene.device)
    prepared.capture(lambda *facts: slots)
    scene.backend.synchronize()
    assert not cache[:8].any()
    slots.copy_(torch.arange(8))
    return prepared, model, slots


def step(scene, prepared, model, slots, batch):
    """Run a step of random rows and compare it with the model; returns its mode."""
    x = scene.rand(batch.num_tokens, 4)
    decision = prepared.dispatch(batch)
    result = prepared.run(decision, x, metadata=slots).clone()
    copied = prepared.copies_done()
    copied.synchronize()
    prepared.reads_done().synchronize()
    assert copied.query()
    assert torch.equal(result, x * model.weight * 3)
    return decision.mode.name


def decode(n):
    return Batch(n, n, is_decode=True, query_len=1)


@pytest.mark.needs_part("seal")
def test_a_model_from_the_first_capture_to_the_close(scene):
    prepared, model, slots = served(scene)
    modes = [
        step(scene, prepared, model, slots, batch)
        for batch in (decode(3), Batch(3, 1), decode(8), Batch(8, 1), decode(4), decode(3))
    ]
    assert modes == ["FULL", "PIECEWISE", "FULL", "PIECEWISE", "FULL", "FULL"]
    without = prepared.dispatch(decode(3), allowed_modes={RuntimeMode.NONE})
    x = scene.rand(3, 4)
    assert torch.equal(prepared.run(without, x, metadata=slots), x * model.weight * 3)
    prepared.seal()
    model.weight = nn.Parameter(torch.rand_like(model.weight), requires_grad=False)
    assert len(prepared.refresh()) == 4
    assert step(scene, prepared, model, slots, decode(3)) == "FULL"
    with pytest.raises(WorkAfterSeal):
        scene.record(torch.neg, scene.rand(2))
    prepared.release()
    assert scene.backend.memory().used == 0 or scene.device.type == "cuda"
    assert prepared.run(prepared.dispatch(decode(3)), x, metadata=slots).shape == (3, 4)
    prepared.capture(lambda *facts: slots)
    assert step(scene, prepared, model, slots, decode(8)) == "FULL"
    prepared.report()
    prepared.close()


def test_memory_grows_with_graphs_and_is_given_back(scene):
    used = scene.backend.memory().used
    recordings = [scene.record(lambda x: x * 2, scene.rand(n)) for n in (1 << 18, 1 << 17)]
    assert recordings[0].bytes > 0
    assert scene.backend.memory().used > used
    for recording in recordings:
        recording.release()
    scene.backend.release_pool(scene.pool)
    assert scene.backend.memory().used <= used


@pytest.mark.parametrize("make", [FakeBackend, lambda t: ReplayBackend(ReplayOptions(limit=t))])
def test_a_graph_beyond_the_memory_is_an_error_that_leaves_the_pool(make):
    scene = make_rig(Only(GraphBackend, make(100)), "cpu")
    with pytest.raises(CaptureOutOfMemory):
        scene.record(lambda x: x * 2, torch.rand(50))
    recording = scene.record(lambda x: x * 2, torch.ones(3))
    recording.replay()
    assert recording.outputs.tolist() == [2, 2, 2]


def test_a_failing_capture_leaves_a_backend_that_captures(scene):
    runs = []

    def raise_at_capture(x):
        runs.append(x * 2)
        if len(runs) == 2:
            raise ValueError("mine")
        return x

    for fn in (raise_at_capture, lambda x: x * x.sum().item()):
        with pytest.raises(CaptureFailed):
            scene.record(fn, scene.rand(2))
    x = scene.rand(3)
    recording = scene.record(lambda x: x + 1, x)
    recording.replay()
    assert torch.equal(recording.outputs, x + 1)


def test_what_the_protocol_does_not_have_cannot_be_read():
    with pytest.raises(AssertionError, match="no 'queue'"):
        _ = Only(GraphBackend, strict_backend(delay=True)).queue
