"""Tensors of a step that share memory: equal to the model itself, or an error that names them."""

import pytest
import torch
from torch import nn

from piecegraph import Batch
from piecegraph.errors import InputsShareMemory

from ..conftest import captured, right_step

pytestmark = pytest.mark.compile

MODES = {"PIECEWISE": Batch(3, 1), "FULL": Batch(3, 3, is_decode=True, query_len=1)}
MODES["NONE"] = Batch(12, 1)


class Model(nn.Module):
    """Writes to `x` and to its buffer; its first result is a view of `y`."""

    def __init__(self):
        super().__init__()
        self.around = torch.zeros(68)  # begins one row before the buffer
        self.register_buffer("seen", self.around[4:].view(16, 4))
        self.register_buffer("scale", torch.ones(16, 4))
        self.listed = [nn.Module()]
        self.listed[0].register_buffer("seen", torch.zeros(16, 4))

    def forward(self, x, y, z):
        x.add_(1)
        out = torch.empty_like(x)
        torch.ops.shared_memory_tests.attend(x, out)
        self.seen.add_(1)
        self.listed[0].seen.add_(1)
        return y[:, :2], out + y + z.repeat(1, 2) * self.scale[0]


def attend(x, out):
    out.copy_(x * 2)


@pytest.fixture(scope="module")
def op(temporary_op):
    return temporary_op("shared_memory_tests::attend", "(Tensor x, Tensor(a!) out) -> ()", attend)


@pytest.fixture(scope="module", params=[True, False], ids=["traced", "untraced"])
def prepared(op, request):
    inputs = {name: f"float32[num_tokens, {n}]" for name, n in {"x": 4, "y": 4, "z": 2}.items()}
    settings = {"graph_mode": "FULL_AND_PIECEWISE", "compile": request.param}
    return captured(
        Model(), 16, splitting_ops=(op,), inputs=inputs, capture_sizes=(4, 8), **settings
    )


def inputs(n):
    return {"x": torch.randn(n, 4), "y": torch.randn(n, 4), "z": torch.randn(n, 2)}


def run(prepared, mode, given):
    decision = prepared.dispatch(MODES[mode])
    assert decision.mode.name == mode
    return prepared.run(decision, **given)


def columns(n):
    both = torch.randn(n, 8)
    return {"x": both[:, :4], "y": both[:, 4:]}


FINE = {
    "columns of one tensor": columns,
    "inputs that are only read": lambda n: {"y": (y := torch.randn(n, 4)), "z": y[:, 2:]},
    "rows one after another": lambda n: {"x": (t := torch.randn(2 * n, 4))[:n], "y": t[n:]},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", FINE)
def test_inputs_that_share_memory_and_are_not_written(prepared, case, mode):
    n = MODES[mode].num_tokens
    given = inputs(n) | FINE[case](n)
    alone = {name: tensor.clone() for name, tensor in given.items()}
    results, expected = run(prepared, mode, given), Model()(**alone)
    torch.testing.assert_close(tuple(results), expected)
    torch.testing.assert_close(given, alone)


@pytest.mark.parametrize("mode", MODES)
def test_an_input_that_shares_written_memory_is_refused_by_name(prepared, mode):
    n = MODES[mode].num_tokens
    rows, model = torch.randn(n + 1, 4), prepared.compiled.model
    cases = {
        "'x' shares memory with input 'y'": {"x": rows[:n], "y": rows[:n]},
        "'x' shares memory with input 'z'": {"x": rows[:n], "z": rows[1:, 2:]},
        "'y' shares memory with 'seen'": {"y": model.seen[:n]},
        r"'y' shares memory with '.*listed\[0\].*seen'": {"y": model.listed[0].seen[:n]},
        "'z' shares memory with 'seen'": {"z": model.around[: 2 * n].view(n, 2)},
        "'x' shares memory with 'scale'": {"x": model.scale[:n]},
    }
    for message, changed in cases.items():
        with pytest.raises(InputsShareMemory, match=message):
            run(prepared, mode, inputs(n) | changed)


@pytest.mark.parametrize("mode", MODES)
def test_a_result_that_is_a_view_of_an_input_can_be_the_next_steps_input(prepared, mode):
    plain, n = Model(), MODES[mode].num_tokens
    got = expected = torch.randn(n, 2)
    for _ in range(4):
        given = inputs(n) | {"z": got}
        alone = {name: tensor.clone() for name, tensor in given.items()} | {"z": expected}
        (got, out), (expected, wanted) = run(prepared, mode, given), plain(**alone)
        torch.testing.assert_close((got, out), (expected, wanted))


class Cache(nn.Module):
    """Writes keys through a view of its cache; reads both halves of that."""

    def __init__(self, view=True):
        super().__init__()
        torch.manual_seed(0)
        self.keys = nn.Linear(4, 4)
        cache = torch.zeros(2, 32, 4)
        part = cache[0] if view else torch.empty(0).set_(cache.untyped_storage(), 0, (32, 4))
        self.register_buffer("cache", cache)
        self.register_buffer("part", part)

    def forward(self, x, slots):
        self.part.index_copy_(0, slots, self.keys(x))
        return self.cache[0, slots] + self.cache[1, slots]


@pytest.mark.parametrize("view", [True, False])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_buffer_that_is_a_view_of_another_is_state(compiler, view):
    model, plain = Cache(view), Cache(view)
    forms = {"x": "float32[num_tokens, 4]", "slots": "int64[num_tokens]"}
    prepared = captured(model, 16, inputs=forms, capture_sizes=(4,), compiler=compiler)
    assert not model.cache.any()  # written by the capture, and restored
    for _ in range(3):
        inputs = torch.randn(4, 4), torch.randperm(32)[:4]
        assert right_step(prepared, plain, *inputs) == "FULL"
        torch.testing.assert_close(model.cache, plain.cache)


class OnOtherMemory(nn.Module):
    """Its tensors are what torch reads with another sign: a conjugate and its imaginary part."""

    def __init__(self):
        super().__init__()
        self.memory = torch.tensor([1 + 2j, 3 - 4j])
        self.phase = self.memory.conj()
        self.signs = self.memory.conj().imag

    def forward(self, x):
        self.phase.mul_(1j)
        self.signs.add_(1)
        return x * self.phase.real + self.signs


@pytest.mark.parametrize("compile", [True, False], ids=["traced", "untraced"])
def test_state_that_is_read_with_a_changed_sign(compile):
    settings = {"inputs": {"x": "float32[num_tokens, 2]"}, "capture_sizes": (4,)}
    prepared, model = captured(OnOtherMemory(), compile=compile, **settings), OnOtherMemory()
    for n in (3, 4, 2):
        x = torch.randn(n, 2)
        torch.testing.assert_close(prepared(x, batch=Batch(n, n)), model(x))
        assert torch.equal(prepared.compiled.model.memory, model.memory)
