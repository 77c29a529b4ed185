"""What is silent garbage on a device is wrong or an error on the replay backend, in pieces too."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

from piecegraph import Batch, break_graph, get_forward_context, prepare
from piecegraph.errors import AllCapturesFailed, HostValueChanged, StaleContext
from piecegraph.runtime.backends.ownership import Ownership
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from piecegraph.runtime.backends.replay.tape import Tape
from piecegraph.torch_compat.basics.tensors import last_modes, storage_id

from ..conftest import Computes, captured, small_config

pytestmark = pytest.mark.compile


def scaled(x, out):
    out.copy_(x * get_forward_context().metadata)


class Declared:
    graph_constants = ("bound",)

    def __init__(self, bound):
        self.bound = bound


def declared(x, out):
    out.copy_(x * get_forward_context().metadata.bound)


def kept(x, out):
    out.copy_(x * get_forward_context().layers["factor"])


def counted(x, out):
    out.fill_(len(x.nonzero()))


def read(x, out):
    out.fill_(x.sum().item())


def swallowed(x, out):
    try:
        out.fill_(x.sum().item())
    except Exception:
        out.zero_()


def listed(x, out):
    out.fill_(max(x.tolist()[0]))


def as_array(x, out):
    out.fill_(float(np.asarray(x).sum()))


def copied_array(x, out):
    out.fill_(float(np.array(x).sum()))


def from_cpu(x, out):
    out.fill_(float(x.cpu().numpy().sum()))


def in_a_list(x, out):
    out.copy_(torch.tensor([x[0, 0]])[0])


def in_a_list_of_a_method(x, out):
    out.copy_(x.new_tensor(data=[x[0, 0]])[0])


def in_a_list_of_a_class(x, out):
    out.copy_(torch.Tensor([x[0, 0]])[0])


def applied(x, out):
    x.clone().apply_(lambda value: out.fill_(value)[0, 0].sum() and value)


def through_dlpack(x, out):
    out.fill_(float(np.from_dlpack(x)[0, 0]))


def printed(x, out):
    out.fill_(len(str(x)))


def pickled(x, out):
    out.fill_(len(pickle.dumps(x)))


VALUE_READS = (
    *(listed, as_array, copied_array, from_cpu, in_a_list, in_a_list_of_a_method),
    *(in_a_list_of_a_class, applied, through_dlpack, printed, pickled),
)
OTHER_READS = [fn for fn in VALUE_READS if fn not in (listed, in_a_list, through_dlpack)]
NUMPY_WARNS = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def leave(x, out):
    get_forward_context().layers["factor"].norm = x + 1
    out.copy_(x)


def read_left(x, out):
    out.copy_(get_forward_context().layers["factor"].norm)


SET_UP = []


def set_up_on_first_use(x, out):
    if not SET_UP:
        SET_UP.append(x.sum().item())
    out.copy_(x)


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    reading = scaled, declared, kept, counted, read, swallowed, read_left, *VALUE_READS
    for op in (set_up_on_first_use, leave, *reading):
        schema = "(Tensor x, Tensor(a!) out) -> ()"
        temporary_op(f"faithful_tests::{op.__name__}", schema, op)


class Model(nn.Module):
    def __init__(self, op):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.op = getattr(torch.ops.faithful_tests, op.__name__)

    def forward(self, x):
        y = x + self.weight
        out = torch.empty_like(y)
        self.op(y, out)
        return out + 1


def prepared_for(op, *, poison=True, **settings):
    """The op is in a piece: it is not among the splitting ops."""
    config = small_config(capture_sizes=(2, 4)).changed(**settings)
    backend = ReplayBackend(ReplayOptions(poison_before_replay=poison))
    return prepare(Model(op), config, backend=backend, layers={"factor": 2.0})


def step(prepared, metadata):
    return prepared(torch.ones(2, 4), batch=Batch(2, 2), metadata=metadata)


INDUCTOR = pytest.param("inductor", marks=pytest.mark.heavy)


@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])
def test_failure_23_an_op_in_a_piece_sees_the_context_of_the_capture(compiler):
    prepared = prepared_for(scaled, poison=False, compiler=compiler)
    assert step(prepared, 3.0).unique().item() == 7  # without a graph
    prepared.capture(lambda descriptor, mode: 5.0)
    assert step(prepared, 5.0).unique().item() == 11
    with pytest.raises(
        StaleContext, match=r"scaled read metadata .* 5.0, and 3.0 .*splitting_ops"
    ) as caught:
        step(prepared, 3.0)
    line = scaled.__code__.co_firstlineno + 1
    assert caught.value.where.endswith(f"test_faithful_replay.py:{line}")


def test_failure_23_a_replay_reads_the_context_of_its_capture():
    """As on a device, whatever the step brings: here a declared constant that changed."""
    prepared = prepared_for(declared, poison=False)
    prepared.capture(lambda descriptor, mode: Declared(5.0))
    assert step(prepared, Declared(3.0)).unique().item() == 11


def test_what_is_the_same_object_in_each_step_may_be_read():
    prepared, metadata = prepared_for(scaled), torch.tensor(5.0)
    prepared.capture(lambda descriptor, mode: metadata)
    metadata.fill_(3.0)
    assert step(prepared, metadata).unique().item() == 7
    prepared = prepared_for(kept)
    prepared.capture()
    assert step(prepared, object()).unique().item() == 5


@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])
def test_an_op_in_a_piece_may_keep_the_memory_of_its_result(temporary_op, compiler):
    """For one size: a smaller graph takes its place. A device writes where it wrote at capture."""
    kept = [torch.empty(0)]

    def into_kept(x):
        if kept[0].shape != x.shape:
            kept[0] = torch.empty_like(x)
        return torch.mul(x, 2, out=kept[0])

    name = f"into_kept_{compiler}"
    temporary_op(f"faithful_tests::{name}", "(Tensor x) -> Tensor", into_kept, torch.empty_like)

    keeping = Computes(lambda x: getattr(torch.ops.faithful_tests, name)(x + 1) + 1)
    prepared = captured(keeping, 8, ReplayBackend(), capture_sizes=(2, 4), compiler=compiler)
    for number, size in enumerate((4, 2, 4)):
        result = prepared(torch.full((size, 4), float(number)), batch=Batch(size, size))
        assert result.unique().tolist() == [2 * number + 3]


def test_a_splitting_op_that_declares_nothing_sees_the_metadata_of_each_step():
    """By default no graph freezes what the op reads in Python, not even in decode."""
    settings = {"splitting_ops": ("faithful_tests::scaled",), "attention": {"support": None}}
    prepared = prepared_for(scaled, graph_mode=None, **settings)
    prepared.capture(lambda descriptor, mode: 5.0)
    batch = Batch(2, 2, is_decode=True, query_len=1)
    assert prepared.dispatch(batch).mode.name == "PIECEWISE"
    for metadata in (3.0, 4.0):
        result = prepared(torch.ones(2, 4), batch=batch, metadata=metadata)
        assert result.unique().item() == 2 * metadata + 1


@NUMPY_WARNS
@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])
@pytest.mark.parametrize("op", [counted, read, *VALUE_READS])
def test_a_host_read_in_a_piece_fails_the_capture_with_its_line(op, compiler):
    prepared = prepared_for(op, compiler=compiler)
    line = op.__code__.co_firstlineno + 1
    with pytest.raises(AllCapturesFailed, match=f"on the host .*test_faithful_replay.py:{line}"):
        prepared.capture()
    assert step(prepared, None).shape == (2, 4)


@pytest.mark.parametrize("shares", [torch.asarray, torch.from_dlpack, copy.deepcopy])
def test_a_copy_or_another_view_of_memory_reads_no_value(shares):
    def shared(x, out):
        out.copy_(shares(x) * 2.0)

    model = Reading(break_graph(fake=lambda x, out: None)(shared))
    prepared = captured(model, 4, ReplayBackend(), compile=False, capture_sizes=(4,))
    assert step(prepared, None).unique().tolist() == [3.0]


class Reading(nn.Module):
    """Not traced: its op is called by the forward, or is its forward."""

    def __init__(self, op):
        super().__init__()
        self.op = op

    def forward(self, x):
        out = torch.empty_like(x)
        self.op(x, out)
        return out + 1


@NUMPY_WARNS
@pytest.mark.parametrize(
    ("fn", "is_op"),
    [
        *((fn, True) for fn in VALUE_READS),
        *((fn, False) for fn in (listed, in_a_list, through_dlpack)),
        *(pytest.param(fn, False, marks=pytest.mark.heavy) for fn in OTHER_READS),
    ],
)
def test_infinilm_540_a_value_read_of_a_model_that_is_not_traced_fails_the_capture(fn, is_op):
    op = getattr(torch.ops.faithful_tests, fn.__name__) if is_op else fn
    model = Reading(break_graph(fake=lambda x, out: None)(op))
    given, line = (model, 4, ReplayBackend()), fn.__code__.co_firstlineno + 1
    settings = {"compile": False, "capture_sizes": (4,)}
    with pytest.raises(AllCapturesFailed, match=f"on the host .*test_faithful_replay.py:{line}"):
        captured(*given, **settings)
    eager = captured(*given, graph_mode="PIECEWISE", **settings)
    assert step(eager, None).shape == (2, 4)  # between graphs an op may read values


def test_a_host_read_of_a_piece_itself_names_no_line_of_ours():
    chosen = Computes(lambda x: x[x[:, 0] > 0].sum(0) + x)
    with pytest.raises(AllCapturesFailed, match=r"inside a captured region\. Compute"):
        captured(chosen, 4, ReplayBackend(), capture_sizes=(4,))


def test_a_host_read_in_an_op_for_all_devices_fails_the_capture():
    """`torch.library.custom_op` without device types registers no kernel of the CPU's own."""

    def read_anywhere(x: torch.Tensor, out: torch.Tensor) -> None:
        out.fill_(x.sum().item())

    torch.library.custom_op("faithful_tests::read_anywhere", read_anywhere, mutates_args={"out"})
    line = read_anywhere.__code__.co_firstlineno + 1
    with pytest.raises(AllCapturesFailed, match=f"on the host .*test_faithful_replay.py:{line}"):
        prepared_for(read_anywhere).capture()


def test_captures_that_fail_in_part_are_no_error():
    prepared = prepared_for(kept)
    prepared.backend.options = ReplayOptions(failing_captures=frozenset({1}))
    prepared.capture()
    assert len(prepared.recordings()) == 1


class Swallowing(Reading):
    def forward(self, x):
        try:
            return super().forward(x)
        except Exception:
            return x + 1


@pytest.mark.parametrize("op", [swallowed, read])
def test_a_host_read_whose_error_the_op_or_the_model_swallows_fails_the_capture_too(op):
    if op is swallowed:
        prepared = prepared_for(op)
    else:
        model = Swallowing(torch.ops.faithful_tests.read)
        config = small_config(4, compile=False, capture_sizes=(4,))
        prepared = prepare(model, config, backend=ReplayBackend())
    line = op.__code__.co_firstlineno + 1 + (op is swallowed)
    with pytest.raises(AllCapturesFailed, match=f"on the host .*test_faithful_replay.py:{line}"):
        prepared.capture()


def test_failure_22_what_is_set_up_on_first_use_is_set_up_before_the_first_capture():
    prepared = prepared_for(set_up_on_first_use)
    SET_UP.clear()
    prepared.capture()
    assert len(prepared.recordings()) == 2


def test_an_op_in_a_piece_does_not_read_what_a_splitting_op_left():
    class Two(Model):
        def forward(self, x):
            torch.ops.faithful_tests.leave(x + self.weight, out := torch.empty_like(x))
            return super().forward(x + out)

    config = small_config(
        4, capture_sizes=(4,), graph_mode="PIECEWISE", splitting_ops=("faithful_tests::leave",)
    )
    layers = {"factor": SimpleNamespace()}
    left = prepare(Two(read_left), config, backend=ReplayBackend(), layers=layers)
    with pytest.raises(AllCapturesFailed, match=r"that faithful_tests\.leave.* left elsewhere"):
        left.capture()


class Weighted(nn.Module):
    """An attribute that is no buffer: a move of the model to a device leaves it on the host."""

    def __init__(self):
        super().__init__()
        self.factor = torch.tensor(2.0)
        self.register_buffer("shift", torch.tensor(1.0))

    def forward(self, x):
        return x * self.factor + self.shift


@pytest.mark.parametrize("compiled", [True, False])
def test_a_value_on_the_host_that_changes_after_a_capture_is_an_error(compiled):
    model, backend = Weighted(), ReplayBackend(ReplayOptions(poison_before_replay=True))
    prepared = captured(model, 4, backend, compile=compiled, capture_sizes=(2,))
    (noticed,) = prepared.report()["host_values"]
    assert noticed["tensors"] == ["factor"]
    model.shift.fill_(3.0)  # on a device, too, the graph reads its memory
    assert step(prepared, None).unique().item() == 5
    model.factor.fill_(7.0)
    with pytest.raises(HostValueChanged, match="factor is on the host") as caught:
        step(prepared, None)
    if not compiled:
        line = Weighted.forward.__code__.co_firstlineno + 1
        assert str(caught.value.where).endswith(f"test_faithful_replay.py:{line}")
    assert prepared.refresh() == (0,)
    assert step(prepared, None).unique().item() == 10


def moved_by_device(x):
    return x + torch.arange(4).to(x.device)


def moved_after_work(x):
    return x + (torch.ones(4) * 2).float().to(dtype=x.dtype, device=x.device)


def moved_to_another(x):
    return x + torch.tensor([1, 2, 3, 4]).to(x)


def made_on_the_device(x):
    return x.to(x.device) + torch.arange(4, device=x.device).to(x.dtype).to(x.device)


def other_dtype(x):
    return x + torch.arange(4).to(x.dtype)


def form_from_the_host(x):
    return x + torch.zeros_like(torch.arange(4), device=x.device).to(x.device)


MADE_ON_THE_HOST = [moved_by_device, moved_after_work, moved_to_another]


class Calls(nn.Module):
    """Calls a function, and keeps a table that it makes in the first call."""

    def __init__(self, fn, keeps=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4), requires_grad=False)
        self.fn, self.keeps, self.table = fn, keeps, None

    def forward(self, x):
        y = x * self.weight
        if not self.keeps:
            return self.fn(y)
        if self.table is None:
            self.table = self.fn(torch.zeros(4))
        return y + self.table


def captured_by(compiler, model):
    """`compiler` is None for a model that is not traced."""
    way = {"compiler": compiler} if compiler else {"compile": False}
    return captured(model, 4, ReplayBackend(), capture_sizes=(2,), **way)


@pytest.mark.parametrize("compiler", ["eager", None])
@pytest.mark.parametrize("fn", MADE_ON_THE_HOST)
def test_a_copy_from_the_host_fails_the_capture_with_the_line_that_made_it(fn, compiler):
    line = fn.__code__.co_firstlineno + 1
    named = rf"HostCopyInCapture: \w+ makes .*test_faithful_replay.py:{line}\).*device=x\.device"
    with pytest.raises(AllCapturesFailed, match=named):
        captured_by(compiler, Calls(fn))


def test_inductor_makes_a_tensor_of_the_host_on_the_device():
    prepared = captured_by("inductor", Calls(moved_by_device))
    assert step(prepared, None).tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("compiler", ["eager", None])
@pytest.mark.parametrize("fn", [made_on_the_device, other_dtype, form_from_the_host])
def test_what_copies_nothing_from_the_host_is_captured(fn, compiler):
    prepared = captured_by(compiler, Calls(fn))
    assert step(prepared, None).tolist() == fn(torch.ones(2, 4)).tolist()


@pytest.mark.parametrize("compiler", ["eager", None])
def test_under_a_default_device_nothing_is_made_on_the_host(compiler):
    with torch.device("cpu"):
        prepared = captured_by(compiler, Calls(moved_by_device))
    assert step(prepared, None).tolist() == [[1, 2, 3, 4]] * 2


def test_a_table_that_the_warm_up_run_copied_from_the_host_is_captured():
    prepared = captured_by(None, Calls(moved_by_device, keeps=True))
    assert step(prepared, None).tolist() == [[1, 2, 3, 4]] * 2


def test_a_device_that_is_set_around_a_break_inside_the_model():
    """The mode that looks for copies is below that of the model."""
    double = break_graph(lambda y: y.mul_(2))

    def breaks(x):
        with torch.device(x.device):
            y = x + torch.arange(4).to(x.device)
            double(y)
        return y + 1

    settings = {"capture_sizes": (2,), "graph_mode": "PIECEWISE", "compile": False}
    prepared = captured(Calls(breaks), 4, ReplayBackend(), **settings)
    assert step(prepared, None).tolist() == [[3, 5, 7, 9]] * 2
    assert last_modes()[1] is None


@pytest.mark.parametrize("backend", [INDUCTOR, "eager"])
def test_regions_of_the_model_are_compiled_once_and_not_looked_at(backend):
    torch._dynamo.reset()  # other tests have compiled the function
    compiled = []

    def count(graph, inputs):
        compiled.append(graph)
        return graph.forward if backend == "eager" else compile_fx(graph, inputs)

    prepared = captured_by(None, Calls(torch.compile(moved_by_device, backend=count)))
    step(prepared, None)
    assert len(compiled) == 1


def test_a_capture_keeps_no_weights_and_breaks_see_what_the_graph_before_computes(
    temporary_op, monkeypatch
):
    seen, kept = list[float](), set[int]()

    def attend(x, out):
        seen.append(float(x.sum()))
        out.copy_(x)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            y = x * 0 + self.weight
            out = torch.empty_like(y)
            torch.ops.faithful_tests.attend_to(y, out)
            return out + self.weight

    def undo(tape):
        kept.update(storage_id(tensor) for tensor, *_ in tape._before)
        original(tape)

    original = Tape.undo
    monkeypatch.setattr(Tape, "undo", undo)
    op = temporary_op("faithful_tests::attend_to", "(Tensor x, Tensor(a!) out) -> ()", attend)
    model, settings = Two(), {"graph_mode": "PIECEWISE", "splitting_ops": (op,)}
    captured(model, 4, ReplayBackend(), capture_sizes=(2,), **settings)
    assert len(seen) > 1
    assert set(seen) == {8.0}
    assert kept
    assert storage_id(model.weight) not in kept


WRITES_OF_ROWS = {
    "index_copy_": lambda cache, rows, x: cache.index_copy_(0, rows, x),
    "a column": lambda cache, rows, x: cache.T.index_copy_(-1, rows, x.T),
    "index_put_": lambda cache, rows, x: cache.index_put_([rows], x, accumulate=True),
    "from the end": lambda cache, rows, x: cache.index_put_([rows - 64], x),
    "int32": lambda cache, rows, x: cache.index_put_([rows.int()], x),
    "both": lambda cache, rows, x: cache.index_put_([rows, rows % 4], x[:, 0]),
    "a mask": lambda cache, rows, x: cache.index_put_([torch.arange(64) < 2], x[:1]),
}


@pytest.mark.parametrize("form", WRITES_OF_ROWS)
def test_a_capture_copies_the_rows_that_are_written_and_restores_them(form):
    """Also rows that are written twice. Copies of whole caches took as long as ten steps."""
    cache, rows = torch.arange(256.0).reshape(64, 4), torch.tensor([5, 60, 5])
    tape, before = Tape(Ownership()), cache.clone()
    tape.start()
    WRITES_OF_ROWS[form](cache, rows, torch.ones(3, 4))
    tape.stop()
    ((_, content, *_),) = tape._before
    assert not torch.equal(cache, before)
    rows.zero_()  # as an engine's buffer
    tape.finish()
    assert torch.equal(cache, before)
    assert (content.numel() < 256) == (form not in ("int32", "both", "a mask"))
