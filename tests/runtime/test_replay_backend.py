"""What the replay backend emulates: captures do not execute, Python runs once, poison."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close

from piecegraph.errors import CaptureFailed, CaptureOutOfMemory, MovedTensor
from piecegraph.runtime.backends.ownership import Ownership
from piecegraph.runtime.backends.replay.backend import ReplayBackend
from piecegraph.runtime.backends.replay.tape import poison
from piecegraph.runtime.capture.breaks import break_graph, opaque_piece
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session


def capture(fn, *inputs):
    """One raw capture, without the recorder's first replay."""
    backend = ReplayBackend()
    opened = backend.begin(backend.new_pool(), Ownership())
    try:
        result = fn(*inputs)
    except BaseException:
        opened.abort()
        raise
    return opened.end(), result


@pytest.fixture(autouse=True, params=["no_grad", "inference_mode"])
def mode(request):
    """Inside inference mode composite operators reach the tape whole."""
    with getattr(torch, request.param)():
        yield


@pytest.fixture
def library():
    lib = torch.library.Library("piecegraph_tape_test", "DEF")
    yield lib
    lib._destroy()


def test_a_piece_may_use_its_arguments_as_scratch_memory(make_replay_rig):
    """As partitions of one graph do: each run finds the same in them."""
    weight = torch.rand(4, 2)
    index, wide = torch.tensor([3, 1]), torch.ones(2, 1).expand(2, 3)

    def piece(args):
        x, rows, kept = args
        picked = weight[rows] + kept.sum()
        rows.fill_(100)
        x.zero_()
        return (picked + x,)

    def step(x):
        given = index * 1
        (result,) = opaque_piece(piece)([x * 1, given, wide])
        return result

    rig = make_replay_rig()
    recording = rig.record(step, torch.rand(2, 2))
    for _ in range(2):
        recording.replay()
        assert_close(recording.outputs, weight[index] + 6)


class Seen(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def test_bookkeeping_is_no_read_of_the_model(library):
    """What a mode for functions notes is compared in each step, and each one costs time."""
    library.define("counted(Tensor x) -> Tensor")
    library.impl("counted", lambda x: (x @ x).softmax(0) + 1, "CPU")
    backend, seen = ReplayBackend(), Seen()
    ownership = Ownership()
    ownership.reads = lambda: seen
    opened = backend.begin(backend.new_pool(), ownership)
    torch.ops.piecegraph_tape_test.counted(torch.rand(3, 3))
    opened.end()
    assert {"matmul", "softmax"} <= set(seen.names)
    assert "untyped_storage" not in seen.names


def test_a_piece_may_return_its_own_memory(make_replay_rig):
    """What it has returned in the warm-up run, and still holds, is not its graph's."""
    own = torch.zeros(2)

    def step(x):
        (result,) = opaque_piece(lambda args: (own.copy_(args[0]),))([x])
        return result

    recording = make_replay_rig().record(step, torch.ones(2))
    assert own.tolist() == [1, 1]
    assert recording.bytes == 0


def test_a_capture_does_not_execute():
    state = torch.ones(3)

    def step(x):
        state.add_(x.sum())
        state[0] = 9
        torch.mul(x, 2, out=state[1:])
        return state * 2

    graph, result = capture(step, torch.full((2,), 4.0))
    assert state.tolist() == [1, 1, 1]
    assert result.isnan().all()
    graph.replay()
    assert state.tolist() == [9, 8, 8]
    assert result.tolist() == [18, 16, 16]


def test_the_body_of_a_custom_op_runs_once_and_leaves_its_operators(library):
    runs = []

    def attention(q, out):
        runs.append(1)
        out.copy_(q.softmax(-1).reshape(-1))

    library.define("attention(Tensor q, Tensor(a!) out) -> ()")
    library.impl("attention", attention, "CPU")
    op = torch.ops.piecegraph_tape_test.attention.default
    q, out = torch.rand(2, 3), torch.zeros(6)
    graph, _ = capture(op, q, out)
    assert out.tolist() == [0] * 6
    q.copy_(torch.rand(2, 3))
    graph.replay()
    assert runs == [1]
    assert graph.operations == 2
    assert_close(out, q.softmax(-1).view(-1))


def test_an_op_without_operators_inside_is_one_operation(library):
    def double(x):
        return torch.from_numpy(x.numpy() * 2)

    library.define("double(Tensor x) -> Tensor")
    library.impl("double", double, "CPU")
    x = torch.ones(3)
    graph, result = capture(torch.ops.piecegraph_tape_test.double.default, x)
    assert result.isnan().all()
    x.fill_(5)
    graph.replay()
    assert (graph.operations, result.tolist()) == (1, [10, 10, 10])


def normalized(x):
    return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)[0]


def linear(x):
    arguments = x.t().contiguous().t(), torch.ones(3, 3), None, "relu", [], ""
    return torch.ops.mkldnn._linear_pointwise(*arguments)


@pytest.mark.parametrize("kernel", [normalized, linear])
def test_a_kernel_in_c_that_calls_operators_is_recorded_itself(kernel):
    if kernel is linear and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no mkldnn")
    x = torch.randn(4, 3)
    graph, result = capture(kernel, x)
    x.copy_(torch.randn(4, 3))
    graph.replay()
    assert_close(result, kernel(x))


def test_views_of_every_kind_follow_their_base():
    def step(x):
        y = x * 1
        whole, half = y.t().reshape(-1), y.view(-1)[:3]
        half.add_(10)
        return whole, half, y.contiguous(), y[None].expand(2, -1, -1), y.unbind(0)[1]

    x = torch.rand(2, 3)
    graph, got = capture(step, x)
    x.copy_(torch.rand(2, 3))
    graph.replay()
    for mine, true in zip(got, step(x), strict=True):
        assert torch.equal(mine, true)


def test_a_view_made_in_place_is_no_operation():
    x = torch.rand(2, 3)
    graph, got = capture(lambda x: (x * 2).t_().unsqueeze_(0), x)
    assert graph.operations == 1
    x.copy_(torch.rand(2, 3))
    graph.replay()
    assert torch.equal(got, (x * 2).t()[None])


def test_advanced_indexing_with_numbers_is_recorded():
    table, index = torch.rand(5, 2), torch.tensor([1, 3])
    graph, got = capture(lambda i: table[i], index)
    index.copy_(torch.tensor([4, 0]))
    graph.replay()
    assert torch.equal(got, table[[4, 0]])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
    ],
)
def test_a_host_read_fails_the_capture(read, make_replay_rig):
    with pytest.raises(CaptureFailed, match="on the host inside a captured region"):
        make_replay_rig().record(lambda x: read(x * 2), torch.rand(3))


def test_an_opaque_piece_is_one_operation(make_replay_rig):
    piece = opaque_piece(lambda x: (x.exp().log() * 3, x.sum()))
    x = torch.rand(3)
    recording = make_replay_rig().record(lambda x: piece(x * 2), x)
    assert recording.segments[0].operations == 2
    x.copy_(torch.rand(3))
    recording.replay()
    assert_close(recording.outputs, (x * 6, (x * 2).sum()))


def test_an_opaque_piece_may_write_its_arguments_and_return_them(make_replay_rig):
    def fused_add(x, residual):
        residual.add_(x)
        return residual * 2, residual

    piece, residual = opaque_piece(fused_add), torch.ones(2)
    x = torch.ones(2)
    recording = make_replay_rig().record(lambda x: piece(x, residual), x)
    assert residual.tolist() == [2, 2]
    recording.replay()
    assert residual.tolist() == recording.outputs[1].tolist() == [3, 3]
    assert recording.outputs[0].tolist() == [6, 6]


def test_an_opaque_piece_that_returns_a_weight_keeps_it(make_replay_rig):
    weight = torch.ones(2)
    rig = make_replay_rig(poison_before_replay=True)
    recording = rig.record(opaque_piece(lambda x: (weight, x * 2)), torch.ones(2))
    recording.replay()
    assert weight.tolist() == [1, 1]


def test_replaying_a_view_of_inference_memory_needs_no_mode(make_replay_rig):
    x = torch.ones(2)
    recording = make_replay_rig().record(lambda x: x + 1, x)
    with torch.inference_mode(False):
        recording.replay()
    assert recording.outputs.tolist() == [2, 2]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_poison_is_not_a_number(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor.to(torch.complex64).isnan().all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64])
def test_poison_differs_from_new_memory_and_is_an_index_out_of_range(dtype):
    tensor = torch.zeros(3, dtype=dtype)
    poison(tensor)
    assert tensor.bool().all()
    if dtype is torch.int64:
        with pytest.raises(IndexError):
            torch.rand(9)[tensor]


def test_failure_27_poison_shows_an_op_that_leaves_rows_unwritten(make_replay_rig):
    @break_graph
    def attend_real_rows(q, out):
        out[:2] = q[:2]

    def step(x):
        out = torch.empty_like(x)
        attend_real_rows(x * 1, out)
        return out + 0

    rig = make_replay_rig(poison_before_replay=True)
    recording = rig.record(step, torch.ones(3))
    recording.replay()
    assert recording.outputs.isnan().tolist() == [False, False, True]


def test_failure_27_poison_shows_rows_that_only_an_earlier_replay_wrote(make_replay_rig):
    rows = [3]

    @break_graph
    def attend_real_rows(q, out):
        out[: rows[0]] = q[: rows[0]]

    def step(x):
        out = torch.empty_like(x)
        attend_real_rows(x * 1, out)
        return out + 0

    for poisons in (True, False):
        rows[0] = 3
        recording = make_replay_rig(poison_before_replay=poisons).record(step, torch.ones(3))
        rows[0] = 2
        recording.replay()
        assert recording.outputs.isnan().tolist() == [False, False, poisons]


def test_operations_are_counted(make_replay_rig):
    rig = make_replay_rig()
    recording = rig.record(lambda x: (x + 1).view(1, -1) * 2, torch.ones(2))
    before = rig.backend.counters["operations"]
    recording.replay()
    assert rig.backend.counters["operations"] - before == recording.operations == 2


def test_failures_are_injected_at_the_asked_capture(make_replay_rig):
    rig = make_replay_rig(failing_captures=frozenset({2}), exhausting_captures=frozenset({3}))
    x = torch.ones(2)
    rig.record(torch.neg, x)
    with pytest.raises(CaptureFailed, match="injected"):
        rig.record(torch.neg, x)
    with pytest.raises(CaptureOutOfMemory, match="injected"):
        rig.record(torch.neg, x)
    rig.record(torch.neg, x)


def test_failure_13_moved_scratch_fails_where_a_device_reads_old_memory(make_replay_rig):
    scratch = torch.ones(2)
    strict, lax = make_replay_rig(fail_on_moved_inputs=True), make_replay_rig()
    recordings = [rig.record(lambda x: x * scratch, torch.ones(2)) for rig in (strict, lax)]
    scratch.data = torch.full((2,), 5.0)
    with pytest.raises(MovedTensor, match="shape \\(2,\\)"):
        recordings[0].replay()
    recordings[1].replay()
    assert recordings[1].outputs.tolist() == [1, 1]


def test_pool_memory_is_shared_between_recordings_that_are_finalized(make_replay_rig):
    rig = make_replay_rig(graph_bytes=100)
    with capture_session(rig.backend, rig.pool, rig.events) as session:
        big = record(torch.neg, (torch.ones(50),), session, name="big", breaks=False)
        session.finalize()
        small = record(torch.neg, (torch.ones(10),), session, name="small", breaks=False)
        unfinalized = record(torch.neg, (torch.ones(45),), session, name="more", breaks=False)
    assert (big.bytes, small.bytes, unfinalized.bytes) == (300, 100, 120)
    graphs = [recording.graphs for recording in (big, small, unfinalized)]
    for recording in (big, small, unfinalized):
        recording.release()
    assert graphs
    assert rig.backend.memory().used == 0


def test_the_modeled_limit_is_an_out_of_memory(make_replay_rig):
    rig = make_replay_rig(limit=150)
    kept = rig.record(torch.neg, torch.ones(20))
    with pytest.raises(CaptureOutOfMemory, match="would exceed the modeled limit"):
        rig.record(torch.neg, torch.ones(60))
    assert rig.backend.memory().used == 80
    assert rig.backend.memory().free == 70
    again = rig.record(torch.neg, torch.ones(20))  # in the memory of the first
    assert again.bytes == 0
    kept.replay()


def test_failure_34_trial_captures_in_a_pool_of_their_own_leave_nothing(make_replay_rig):
    rig = make_replay_rig()
    kept = rig.record(torch.neg, torch.ones(10))
    used = rig.backend.memory().used
    trial = rig.backend.new_pool()
    with capture_session(rig.backend, trial, rig.events) as session:
        probe = record(torch.neg, (torch.ones(99),), session, name="probe", breaks=False)
    assert rig.backend.memory().used == used + 99 * 4
    probe.release()
    assert rig.backend.memory().used == used
    kept.replay()
