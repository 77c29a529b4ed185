"""Tensors that are no parameters or buffers are bound by the path on which the model reads them."""

import functools
import types

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, prepare
from piecegraph.errors import InputNotTraceable, ModelChanged, MovedTensor
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from tests.text_compiler import use_text_compiler

from .models import Body, X, assert_right
from .starts import start

pytestmark = pytest.mark.compile

GLOBAL = torch.randn(8)
GLOBALS = {"of": [torch.randn(8)], (1, "a"): torch.randn(8)}


class Holder:
    """A plain object, such as a quantization method with packed weights."""

    def __init__(self):
        self.packed = torch.randn(8)
        self.inner = types.SimpleNamespace(scale=torch.randn(8))

    def apply(self, x):
        return x * self.packed + self.inner.scale


def make_closure():
    cell = torch.randn(8)
    return lambda x: x * cell


def times(factor, x):
    return x * factor


class Places(nn.Module):
    """Reads tensors on many paths."""

    def __init__(self):
        super().__init__()
        self.holder = Holder()
        self.plain = torch.randn(8)
        self.listed = [torch.randn(8), {"key": (torch.randn(8),)}]
        self.closure = make_closure()
        self.partial = functools.partial(times, torch.randn(8))
        self.bound = Holder().apply
        self.inner = nn.Module()
        self.inner.plain = torch.randn(8)

    def forward(self, x):
        x = self.holder.apply(x) * self.plain + self.listed[0] + self.listed[1]["key"][0]
        x = self.bound(self.partial(self.closure(x))) + self.inner.plain
        return x * GLOBAL + GLOBALS["of"][0] + GLOBALS[1, "a"]


NAMES = {
    "self.holder.packed",
    "self.holder.inner.scale",
    "self.plain",
    "self.listed[0]",
    "self.listed[1]['key'][0]",
    "self.closure.__closure__[0].cell_contents",
    "self.partial.args[0]",
    "self.bound.__self__.packed",
    "self.bound.__self__.inner.scale",
    "self.inner.plain",
}


def settings(**others):
    return Config(inputs=X, max_num_tokens=16, max_num_reqs=4, splitting_ops=(), **others)


def served(model, **others):
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
    config = settings(compiler="eager", capture_sizes=(4, 8), graph_mode="FULL", **others)
    prepared = prepare(model, config, backend=backend)
    prepared.capture()
    return prepared


def step(prepared, x):
    return prepared(x, batch=Batch(len(x), 1))


def steps(prepared, x, count):
    for _ in range(count):
        step(prepared, x)


def test_each_path_is_followed(compiled):
    model = Places()
    made = compiled(model, inputs=X)
    assert_right(made, model, [5])
    placed = {weight.target for weight in made.plan.weights}
    assert placed >= NAMES
    assert len(placed) == len(NAMES) + 3


def test_a_moved_tensor_is_an_error_until_refresh():
    model = Places()
    prepared = served(model)
    x = torch.randn(3, 8)
    torch.testing.assert_close(step(prepared, x), model(x))
    model.holder.inner.scale.mul_(2)
    torch.testing.assert_close(step(prepared, x), model(x))
    kept, model.listed[1]["key"] = model.listed[1], (torch.randn(8),)
    with pytest.raises(MovedTensor, match=r"self\.listed\[1\]\['key'\]\[0\]"):
        steps(prepared, x, len(NAMES))
    prepared.refresh()
    torch.testing.assert_close(step(prepared, x), model(x))
    model.plain = torch.randn(4)
    with pytest.raises(ModelChanged, match=r"model\.plain: torch\.float32\[8\] cpu -> .*\[4\]"):
        prepared.refresh()
    del model.plain
    with pytest.raises(ModelChanged, match=r"model\.plain"):
        prepared.refresh()
    assert kept


def test_a_list_that_shares_a_parameter_stays_with_its_tensor():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))
            self.listed = [self.weight]

        def forward(self, x):
            return x * self.listed[0]

    model = Shared()
    prepared = served(model)
    x = torch.randn(3, 8)
    model.weight = nn.Parameter(torch.randn(8))
    prepared.refresh()
    with torch.no_grad():
        torch.testing.assert_close(step(prepared, x), model(x))


def test_a_tensor_that_the_model_writes_is_restored_after_dummy_batches():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = types.SimpleNamespace(steps=torch.zeros(1))

        def forward(self, x):
            self.state.steps.add_(1)
            return x + self.state.steps

    model = Counts()
    prepared = served(model)
    assert model.state.steps == 0
    assert step(prepared, torch.zeros(3, 8))[0, 0] == 1
    assert model.state.steps == 1


def test_a_bundle_is_used_only_where_the_tensors_have_the_same_form(tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)

    class Model(nn.Module):
        def __init__(self, dtype=torch.float32):
            super().__init__()
            self.holder = types.SimpleNamespace(table=torch.arange(8, dtype=dtype))

        def forward(self, x):
            return x * self.holder.table

    x = torch.randn(3, 8)
    assert not start(Model(), tmp_path).hit
    again = start(Model(), tmp_path)
    assert again.hit
    torch.testing.assert_close(again(x), Model()(x))
    other = start(Model(torch.float64), tmp_path)
    assert not other.hit
    assert "holder.table" in other.reason
    assert other(x).dtype is torch.float64


def test_what_no_path_leads_to_is_refused_with_the_line(compiled):
    def body(m, x):
        return x * m.number  # here

    model = Body(body)
    model.number = torch.ones(()).numpy()[()]
    with pytest.raises(InputNotTraceable, match=r"number.*torch\.compile.*item\(\)") as raised:
        compiled(model, inputs=X)
    assert raised.value.where.startswith(__file__)


def test_an_array_of_numpy_is_read_where_it_is(tmp_path, monkeypatch):
    use_text_compiler(monkeypatch)
    model, x = Body(lambda m, x: x * torch.from_numpy(m.array)), torch.randn(3, 8)
    model.array = torch.full((8,), 2.0).numpy()
    assert not start(model, tmp_path).hit
    warm = start(model, tmp_path)
    assert warm.hit
    prepared = served(model)
    for _ in range(2):
        torch.testing.assert_close(warm(x), model(x))
        torch.testing.assert_close(step(prepared, x), model(x))
        model.array[:] = 3.0
    model.array = torch.full((8,), 4.0).numpy()
    with pytest.raises(MovedTensor, match=r"torch\.as_tensor\(self\.array\)"):
        steps(prepared, x, len(NAMES))
    prepared.refresh()
    torch.testing.assert_close(step(prepared, x), model(x))
