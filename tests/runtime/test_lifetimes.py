"""Which tensors a recording keeps alive, and that a trace leaves nothing behind."""

import gc
import logging
import weakref
from collections import Counter

import pytest
import torch
from torch import nn
from torch._dynamo.utils import clear_compilation_metrics
from torch.testing import assert_close

from piecegraph import Batch, prepare
from piecegraph.runtime.backends.replay.backend import ReplayBackend
from piecegraph.runtime.capture.breaks import break_graph, opaque_piece
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session
from piecegraph.torch_compat.basics.tensors import storage_id, unowned_alias, weak_storage

from .conftest import found_by, small_config, strict_backend, tensors_alive


@pytest.fixture(autouse=True)
def recordings_own_no_bridge(monkeypatch):
    """As on a device, where tensors that a graph made are held weakly."""
    monkeypatch.setattr(ReplayBackend, "weak", lambda self, tensor: unowned_alias(tensor))


def churn(rig):
    """Allocate over memory of these sizes that was freed too early."""
    return [torch.full((8, 8), float("nan"), device=rig.device) for _ in range(64)]


@break_graph
def look_up(q, table):
    return q @ table


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda x, table: x @ table, id="failure_14_a_view_in_a_graph"),
        pytest.param(
            lambda x, table: opaque_piece(torch.matmul)(x, table) + 0,
            id="failure_14_an_argument_of_a_compiled_piece",
        ),
        pytest.param(
            lambda x, table: look_up(x * 1, table) + 0, id="failure_15_an_argument_of_an_eager_call"
        ),
    ],
)
def test_failure_14_a_temporary_that_a_recording_reads_is_held(rig, read):
    expected, x = rig.rand(8, 8), rig.rand(8, 8)

    def record_with_temporary():
        temporary = expected.clone().t().t()
        return rig.record(lambda x: read(x, temporary), x)

    recording = record_with_temporary()
    replay_among_garbage(rig, recording, x)
    assert_close(recording.outputs, x @ expected)


def replay_among_garbage(rig, recording, x):
    """With other inputs, when all memory that it does not hold has another owner."""
    gc.collect()
    kept = churn(rig)
    x.copy_(rig.rand(8, 8))
    recording.replay()
    assert len(kept) == 64


def test_failure_15_workspaces_and_results_of_eager_calls_are_held(rig):
    @break_graph
    def through(q, workspace):
        workspace.copy_(q)
        return workspace * 2

    def step(x):
        workspace = torch.empty(8, 8, device=rig.device)
        return through(x + 1, workspace) + workspace

    x = rig.rand(8, 8)
    recording = rig.record(step, x)
    replay_among_garbage(rig, recording, x)
    assert_close(recording.outputs, (x + 1) * 3)


def test_failure_16_a_later_smaller_recording_leaves_earlier_ones_right(rig):
    @break_graph
    def attend(q, out):
        out.copy_(q.cumsum(0))

    def step(x):
        for _ in range(3):
            q = x * 2
            out = torch.empty_like(q)
            attend(q, out)
            x = q + out
        return x

    buffer = rig.rand(16, 8)
    with capture_session(rig.backend, rig.pool, rig.events) as session:
        recordings = {
            size: record(step, (buffer[:size],), session, name=str(size), breaks=True)
            for size in (16, 8, 4)
        }
    for size in (4, 16, 8, 16):
        buffer.copy_(rig.rand(16, 8))
        recordings[size].replay()
        expected = buffer[:size]
        for _ in range(3):
            expected = expected * 2 + (expected * 2).cumsum(0)
        assert_close(recordings[size].outputs, expected)


def test_failure_16_failure_17_bridges_are_held_until_the_session_is_finalized(rig):
    held = {}

    @break_graph
    def attend(q, out):
        out.copy_(q)

    def step(x):
        q = x * 2
        out = torch.empty_like(q)
        held[len(x)] = [weakref.ref(q), weakref.ref(out)]  # of the capture, not of its warm-up run
        attend(q, out)
        return out + 1

    x = rig.rand(3)
    with capture_session(rig.backend, rig.pool, rig.events) as session:
        first = record(step, (x,), session, name="first", breaks=True)
        record(step, (rig.rand(2),), session, name="second", breaks=True)
        assert all(bridge() is not None for bridges in held.values() for bridge in bridges)
        session.finalize()
        assert all(bridge() is None for bridges in held.values() for bridge in bridges)
        assert [found.data_ptr() for found in found_by(first.ownership)] == [x.data_ptr()]
        record(step, (rig.rand(2),), session, name="third", breaks=True)
    assert all(bridge() is None for bridges in held.values() for bridge in bridges)


def test_an_unowned_alias_reads_and_writes_without_keeping_alive():
    tensor = torch.rand(3, 4)
    alias = unowned_alias(tensor[1:, ::2])
    assert torch.equal(alias, tensor[1:, ::2])
    alias.fill_(5)
    assert tensor[1, 2] == 5
    storage = weak_storage(tensor)
    assert storage_id(alias) != storage_id(tensor)
    del tensor
    assert storage.expired()


def test_memory_is_flat_over_200_captures_and_releases(make_replay_rig):
    @break_graph
    def attend(q):
        return q.cumsum(0)

    rig = make_replay_rig()
    x = rig.rand(4)

    def cycle():
        with capture_session(rig.backend, rig.pool, rig.events, prepare=False) as session:
            recording = record(lambda x: attend(x * 2) + 1, (x,), session, name="c", breaks=True)
        recording.replay()
        recording.release()

    cycle()
    before = tensors_alive()
    gc.disable()
    try:
        for _ in range(200):
            cycle()
        assert tensors_alive() == before  # freed at once, without the garbage collector
    finally:
        gc.enable()
    assert rig.backend.memory().used == 0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * torch.arange(x.shape[0])[:, None]


@pytest.mark.compile
@pytest.mark.parametrize("shapes", ["backed", "backed_size_oblivious", "unbacked"])
def test_traces_of_models_that_are_gone_are_freed(shapes):
    def prepare_and_drop():
        config = small_config(16, tracing={"dynamic_shapes": shapes}, graph_mode="PIECEWISE")
        prepare(Scaled(), config, backend=strict_backend())
        gc.collect()

    def alive():
        kinds = {"ShapeEnv", "FakeTensorMode", "FakeTensor", "GraphModule", "OutputGraph"}
        names = (type(thing).__name__ for thing in gc.get_objects())
        return Counter(name for name in names if name in kinds) + Counter(globals=len(globals()))

    prepare_and_drop()
    before = alive()
    for _ in range(3):
        prepare_and_drop()
    assert alive() <= before


def test_closed_models_leave_no_objects(monkeypatch):
    for name in ("piecegraph", "torch.__trace"):  # pytest keeps what is logged
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)
    config = small_config(16, inputs={"input": "float32[num_tokens, 8]"}, capture_sizes=(4, 8))

    def objects_after(cycles):
        for _ in range(cycles):
            prepared = prepare(nn.Linear(8, 8).requires_grad_(False), config)
            prepared.capture()
            prepared(torch.ones(3, 8), batch=Batch(3, 3, is_decode=True, query_len=1))
            prepared.close()
        del prepared
        clear_compilation_metrics()  # torch keeps the last 64
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(12)
    assert objects_after(12) - before < 36
