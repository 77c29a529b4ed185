"""What only the first run of a model sets up is kept as a whole, or refused as a whole."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import Batch, ForwardContext, forward_context, prepare
from piecegraph.errors import AllCapturesFailed, SetUpOnFirstUse
from piecegraph.runtime.capture.first_use import SMALL, UNDONE
from piecegraph.runtime.capture.op_log import OpLog
from piecegraph.runtime.forward_context import get_forward_context
from piecegraph.runtime.tensors_by_path import tensors_by_path
from piecegraph.torch_compat.basics.tensors import writes_counted

from ..conftest import captured, small_config, strict_backend

GLOBAL = SimpleNamespace(ready=False)


@dataclass
class Flag:
    ready: bool = False
    table: Tensor | None = None


@dataclass
class Layer:
    """What the ops find in the forward context: who holds the flag, and what they do."""

    holder: Any
    act: Callable[[Layer, Tensor, Tensor], None]


def set_up(layer, x, scale):
    if not layer.holder.ready:
        scale.copy_(x.abs().max() + 2)
        layer.holder.ready = True


def each_time(layer, x, scale):
    scale.copy_(x.abs().max() + 2)
    layer.holder.ready = True


def make_table(layer, x, scale):
    if not layer.holder.ready:
        layer.holder.table = torch.full((), 3.0)
        layer.holder.ready = True


def calculate(x, scale):
    layer = get_forward_context().layers["layer"]
    layer.act(layer, x, scale)


def scale_by_layer(x, out):
    """Its scale is no argument: no schema tells that it is written."""
    layer = get_forward_context().layers["layer"]
    if not layer.ready:
        layer.scale.fill_(x.abs().max() + 2)
        layer.ready = True
    out.copy_(x * layer.scale[0])


def derive(x, out):
    metadata = get_forward_context().metadata
    if metadata.derived is None:
        metadata.derived = metadata.lens + 1
    out.copy_(x * metadata.derived[: len(x), None])


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    temporary_op("first_tests::calculate", "(Tensor x, Tensor(a!) scale) -> ()", calculate)
    temporary_op("first_tests::derive", "(Tensor x, Tensor(a!) out) -> ()", derive)
    temporary_op("first_tests::scale", "(Tensor x, Tensor(a!) out) -> ()", scale_by_layer)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.ready = False

    def forward(self, x):
        y = self.linear(x)
        torch.ops.first_tests.calculate(y, self.scale)
        return y * self.scale


OP = "first_tests::calculate"
HOLDERS = {
    "module": lambda model: model,
    "layer": lambda model: Flag(),
    "global": lambda model: GLOBAL,
}


def prepared_for(model, layers, mode, **more):
    config = small_config(16, capture_sizes=(2, 4), graph_mode=mode, splitting_ops=(OP,))
    return prepare(model, config.changed(**more), layers=layers, backend=strict_backend())


@pytest.fixture
def model():
    GLOBAL.ready = False
    return Model()


MODES = [("PIECEWISE", (OP,)), ("FULL", (OP,)), ("FULL", ())]


@pytest.mark.parametrize(("mode", "splits"), MODES)
@pytest.mark.parametrize("where", HOLDERS)
def test_sglang_32718_a_buffer_that_the_first_run_fills_is_refused_as_a_whole(
    model, mode, splits, where
):
    layer = Layer(HOLDERS[where](model), set_up)
    prepared = prepared_for(model, {"layer": layer}, mode, splitting_ops=splits)
    for start in (prepared.capture, lambda: prepared.warm_up()):
        op = "the model" if where == "global" else OP  # it does not run as the first time again
        with pytest.raises(SetUpOnFirstUse, match=f"{op} sets up .*'scale'.*Run a step"):
            start()
    assert model.scale.item() == 1
    if where == "global":
        return  # nobody knows the flag: it is refused for good
    assert not layer.holder.ready
    x = torch.rand(3, 4)
    assert torch.equal(prepared(x, batch=Batch(3, 1)), model.linear(x) * model.scale)
    assert layer.holder.ready
    assert model.scale.item() == pytest.approx(model.linear(x).abs().max().item() + 2)
    prepared.capture()
    assert len(prepared.recordings()) == 2
    # its graph has four rows, which some CPUs multiply in another order
    torch.testing.assert_close(prepared(x, batch=Batch(3, 1)), model.linear(x) * model.scale)
    assert not prepared.events.named("first_use")


@pytest.mark.parametrize(("mode", "splits"), MODES)
@pytest.mark.parametrize("where", ["module", "layer"])
def test_attributes_that_the_first_run_makes_are_kept_and_told(model, mode, splits, where):
    layer = Layer(HOLDERS[where](model), make_table)
    prepared = prepared_for(model, {"layer": layer}, mode, splitting_ops=splits)
    prepared.capture()
    assert layer.holder.table.item() == 3
    (event,) = prepared.events.named("first_use")
    assert event.facts["op"] == OP
    assert [name.rpartition(".")[2] for name in event.facts["names"]] == ["ready", "table"]


class Attention(nn.Module):
    ready = False

    def __init__(self, kind, size):
        super().__init__()
        scale = torch.ones(size)
        if kind == "buffer":
            self.register_buffer("scale", scale)
        else:
            self.scale = nn.Parameter(scale, requires_grad=False) if kind == "parameter" else scale


class Scaling(nn.Module):
    """`attention`, which the op finds among the layers, may be a module of the model."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        torch.ops.first_tests.scale(x, out := torch.empty_like(x))
        return out + 1


@pytest.mark.parametrize("size", [1, 20_000])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", ["buffer", "parameter", "attribute", "of no module"])
def test_a_tensor_of_a_layer_that_the_first_run_fills_is_refused(kind, compiled, size):
    """No trace knows it. One that is large is not copied, and so cannot be restored."""
    plain = kind == "of no module"
    layer = SimpleNamespace(ready=False, scale=torch.ones(size)) if plain else Attention(kind, size)
    model = Scaling(None if plain else layer)
    splits = ("first_tests::scale",)
    for mode in ("PIECEWISE", "FULL"):
        settings = {"splitting_ops": splits, "compile": compiled}
        prepared = prepared_for(model, {"layer": layer}, mode, **settings)
        named = "first_tests::scale sets up .*scale"
        for _ in range(2):
            with pytest.raises(SetUpOnFirstUse, match=named) as raised:
                prepared.capture()
        restored = raised.value.facts["left"] == UNDONE
        assert restored is (layer.scale[0].item() == 1)
        assert restored or size > 1
        assert not layer.ready


def test_a_parameter_that_code_without_a_trace_writes_is_restored():
    class Halving(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

        def forward(self, x):
            self.scale.data.mul_(0.5)
            return x * self.scale

    model = Halving()
    prepared = prepared_for(model, {}, "FULL", splitting_ops=(), compile=False)
    prepared.capture()
    assert model.scale[0].item() == 1
    assert prepared(torch.ones(4, 4), batch=Batch(4, 1))[0, 0].item() == 0.5


def test_attributes_that_each_run_changes_are_restored():
    """Dummy batches are no steps. What a break counts goes on to be counted in steps."""

    def count(layer, x, scale):
        layer.holder.count += 1
        layer.holder.seen.append(len(x))

    class Counting(Model):
        def forward(self, x):
            self.calls += 1
            self.last = self.linear(x)
            return super().forward(x)

    for compiled, mode in itertools.product((True, False), ("PIECEWISE", "FULL")):
        model, counts = Counting(), SimpleNamespace(count=0, seen=[])
        model.calls, model.last = 0, None
        layers = {"layer": Layer(counts, count), "counts": counts}
        prepared = prepared_for(model, layers, mode, compile=compiled)
        prepared.capture()
        prepared.warm_up()
        assert (model.calls, model.last, counts.count, counts.seen) == (0, None, 0, [])
        dropped = [each.facts["changed"] for each in prepared.events.named("effect_dropped")]
        assert dropped.count("self.calls" if compiled else "model.calls") == 1
        if mode == "PIECEWISE":  # a FULL graph would have the count of the capture
            prepared(torch.rand(3, 4), batch=Batch(3, 1))
            assert counts.count == 1


def test_what_each_run_writes_is_restored_and_no_set_up(model):
    prepared = prepared_for(model, {"layer": Layer(model, each_time)}, "PIECEWISE")
    prepared.capture()
    assert model.scale.item() == 1
    assert len(prepared.recordings()) == 2


@dataclass
class Metadata:
    lens: Tensor
    derived: Tensor | None = None


class Deriving(nn.Module):
    def forward(self, x):
        for _ in range(2):
            torch.ops.first_tests.derive(x, out := torch.empty_like(x))
            x = out + 1
        return x


@pytest.mark.parametrize("is_one", [True, False])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_sglang_38994_what_is_derived_from_metadata_when_it_is_needed_is_in_the_graph(mode, is_one):
    """Also if all dummy batches are given one object."""
    model, lens = Deriving(), torch.ones(16)
    one = Metadata(lens)
    prepared = prepared_for(model, {}, mode, splitting_ops=("first_tests::derive",))
    prepared.watch("lens", lens)
    prepared.capture(lambda descriptor, mode: one if is_one else Metadata(lens))
    for value, rows in itertools.product((1.0, 5.0), (3, 2)):  # of the first graph, and a later one
        lens.fill_(value)
        x = torch.rand(rows, 4)
        got = prepared(x, batch=Batch(rows, 1), metadata=Metadata(lens))
        with forward_context(ForwardContext({}, metadata=Metadata(lens))):
            assert torch.equal(got, model(x))


def test_a_proof_of_the_step_that_sets_up_does_not_count(model):
    layer = Layer(model, set_up)
    proofs = {"every": 1, "share": 1.0}
    prepared = prepared_for(model, {"layer": layer}, "PIECEWISE", shadow=proofs)
    for _ in range(3):
        x = torch.rand(3, 4)
        assert torch.equal(prepared(x, batch=Batch(3, 1)), model.linear(x) * model.scale)
    shadow = prepared.report()["shadow"]
    assert shadow["wrong"] == []
    assert shadow["skipped"] == {"the step set up state of the model": 1}
    assert sum(each["count"] for each in shadow["proved"]) == 2
    model.ready = False  # it is to be set up again
    with pytest.raises(SetUpOnFirstUse):
        prepared.capture()
    assert prepared.report()["shadow"]["proved"] == []


class Ambiguous:
    """A configuration whose layers have values of their own raises for one that is read of it."""

    table = torch.zeros(1)

    def __init__(self):
        self.heads, self.scale = torch.ones(2), torch.ones(3)

    def __getattribute__(self, name):
        if name == "heads":
            raise ValueError("read it of a layer")
        return super().__getattribute__(name)

    @property
    def width(self):
        raise ValueError("read it of a layer")


@dataclass(slots=True)
class Slots:
    scale: Tensor
    unset: Any = None


def test_no_code_of_an_object_runs_where_its_tensors_are_looked_for():
    slots = Slots(torch.ones(2))
    del slots.unset
    found = dict(tensors_by_path("x", [Ambiguous(), slots]))
    assert set(found) == {"x[0].heads", "x[0].scale", "x[0].table", "x[1].scale"}


def test_a_model_whose_configuration_raises_is_captured():
    model = nn.Linear(8, 8).requires_grad_(False)
    model.config = Ambiguous()
    inputs = {"input": "float32[num_tokens, 8]"}
    assert captured(model, 4, inputs=inputs).recordings()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL"])
def test_a_capture_runs_twice_and_the_first_of_a_kind_six_times(model, mode):
    """The first run; the same again; what ops write; that before the capture; the one that notes
    reads, which must run the same operators; the capture."""
    runs = []

    def count(layer, x, scale):
        runs.append(len(x))
        scale.copy_(x.abs().max() + 2)

    prepared_for(model, {"layer": Layer(None, count)}, mode).capture()
    assert runs == [4] * 6 + [2] * 2


def test_a_run_whose_operators_are_logged_cannot_tell_what_it_writes():
    """Torch counts no in-place writes beneath a dispatch mode: a KV cache that each run writes
    would be one that only the first run fills. So the second run is not that before the capture."""
    table, counts = torch.zeros(SMALL), []
    layers = {"layer": SimpleNamespace(ready=False, scale=table)}
    with torch.no_grad(), forward_context(ForwardContext(layers)):
        for context in (nullcontext(), OpLog(lambda op: None)):
            layers["layer"].ready = False
            with context:
                torch.ops.first_tests.scale(torch.ones(1), torch.ones(1))
            counts.append(writes_counted(table))
    assert counts[0] > 0
    assert counts[1] == counts[0]


class Moving(nn.Module):
    """Gives a tensor other memory, or another form, in each run."""

    def __init__(self, move):
        super().__init__()
        self.register_buffer("count", torch.zeros(4, 4))
        self.move = move

    def forward(self, x):
        return x + self.move(self, x)


def moved_by_data(model, x):
    model.count.data = model.count + 1
    return model.count[0]


def moved_by_set(model, x):
    return model.count.set_(model.count + 1)[0]


def turned(model, x):
    return model.count.t_()[0]


def moved_input(model, x):
    x.data = x.data * 2
    return 0


@pytest.mark.parametrize(
    ("move", "compiles", "name"),
    [
        (moved_by_data, True, "count"),
        (moved_input, True, "input x"),
        (moved_by_set, False, "count"),
        (turned, False, "count"),
        (moved_input, False, "input x"),
    ],
)
def test_a_tensor_that_each_run_gives_other_memory_is_refused(move, compiles, name):
    model = Moving(move)
    prepared = prepare(model, small_config(compile=compiles), backend=strict_backend())
    memory = model.count.data_ptr(), model.count.stride()
    with pytest.raises(AllCapturesFailed, match=f"StateChanged: .* tensors in {name} for"):
        prepared.capture()
    assert (model.count.data_ptr(), model.count.stride()) == memory


def test_memory_that_the_first_run_makes_larger_may_be_moved():
    def grown(model, x):
        return model.count.resize_(16, 4).fill_(2.0)[0]

    prepared = captured(Moving(grown), 4, compile=False)
    result = prepared(torch.ones(4, 4), batch=Batch(4, 4))
    assert result.unique().item() == 3
