"""Rows of models that compute in 16 bits: their rounding hides nothing that padding changes."""

import pytest
import torch
from torch import nn

import piecegraph as pg

from ..conftest import captured

pytestmark = pytest.mark.compile

HIDDEN = 32


def scaled_to(most, dtype):
    """As a quantization to 8 bits with one scale for all rows."""

    def quantized(y):
        scale = y.abs().amax() / most
        whole = (y / scale).round() if dtype == torch.int8 else y / scale
        return whole.to(dtype).to(y.dtype) * scale

    return quantized


def by_expert(y):
    """Rows are grouped, and each is multiplied in its group."""
    expert = y.abs().argmax(-1) % 4
    order = expert.argsort(stable=True)
    return torch.empty_like(y).index_copy(0, order, y[order] * (1 + expert[order])[:, None])


def gate(y):
    return 1 + 0.1 * torch.sigmoid(y.abs().mean() / 4)


def with_outliers(y):
    """As LLM.int8: columns with an outlier in any row are not rounded."""
    return torch.where((y.abs() > 2.5).any(0), y, (y * 4).round() / 4)


MIXING = {
    "int8": scaled_to(127, torch.int8),
    "float8": scaled_to(448, torch.float8_e4m3fn),
    "columns of outliers": with_outliers,
    "a gate of all rows": lambda y: (y.float() * gate(y.float())).to(y.dtype),
}
ROW_WISE = {
    "softmax": lambda y: y.softmax(-1),
    "normalized": lambda y: nn.functional.rms_norm(y, (HIDDEN,)),
    "by expert": by_expert,
    "cast": lambda y: (y.float() * 1.1).to(torch.bfloat16) + y,
}


def double(x):
    if x.dtype == torch.float32:
        raise RuntimeError("takes floats of 16 bits")
    return x * 2


@pytest.fixture(scope="module", autouse=True)
def op(temporary_op):
    temporary_op("short_floats::double", "(Tensor x) -> Tensor", double, torch.empty_like)


class Model(nn.Module):
    """The row of token 0, which padding is, has the largest numbers."""

    def __init__(self, dtype, last):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.rows = nn.Embedding(16, HIDDEN, dtype=dtype)
        self.linear = nn.Linear(HIDDEN, HIDDEN, dtype=dtype)
        for parameter in self.parameters():
            values = torch.randn(parameter.shape, generator=generator)
            parameter.requires_grad_(False).copy_(values / 2)
        self.rows.weight[0] *= 9
        self.last = last

    def forward(self, ids):
        return self.last(self.linear(self.rows(ids)))


def prepared_for(model, compiles=True):
    inputs = {"ids": "int64[num_tokens]"}
    return captured(model, 16, inputs=inputs, capture_sizes=(4, 8), compile=compiles)


def of_right_steps(prepared, model):
    """Modes of steps, each equal to the model but for the last bits."""
    modes, close = [], {"rtol": 2**-6, "atol": 2**-6}
    for num_tokens in (8, 7, 3, 5):
        ids = torch.randint(1, 16, (num_tokens,))
        decision = prepared.dispatch(pg.Batch(num_tokens, num_tokens))
        torch.testing.assert_close(prepared.run(decision, ids), model(ids), **close)
        modes.append(decision.mode.name)
    return modes


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", MIXING)
def test_rows_that_mix_by_less_than_rounding_could_are_found(case, dtype, compiles):
    model = Model(dtype, MIXING[case])
    assert of_right_steps(prepared_for(model, compiles), model) == ["FULL", "NONE", "NONE", "NONE"]


def test_reduced_products_of_float32_hide_nothing():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        model = Model(torch.float32, lambda y: y * (1 + (gate(y) - 1) / 4))
        assert set(of_right_steps(prepared_for(model), model)[1:]) == {"NONE"}
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("case", ROW_WISE)
def test_rows_that_do_not_mix_are_padded(case):
    model = Model(torch.bfloat16, ROW_WISE[case])
    assert of_right_steps(prepared_for(model), model) == ["FULL"] * 4


@pytest.mark.parametrize("mixes", [True, False])
def test_an_operator_that_takes_16_bits_alone_is_run_in_them(mixes):
    def last(y):  # seven rows more are needed for a rank of six
        rank = (y[None, :, 0] > y[:, None, 0]).sum(-1)
        return torch.ops.short_floats.double(y * (rank < 6)[:, None] if mixes else y)

    model = Model(torch.bfloat16, last)
    prepared = prepared_for(model)
    assert bool(prepared.report()["rows_mixed"]) == mixes
    of_right_steps(prepared, model)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory_of_16_bits_is_written_as_the_model_writes_it(dtype, compiles):
    """With an operator that takes any floats, and with one that takes those of the memory."""

    class Keeps(Model):
        def __init__(self):
            super().__init__(torch.bfloat16, MIXING["float8"])
            self.register_buffer("seen", torch.zeros(HIDDEN, dtype=torch.bfloat16))

        def forward(self, ids):
            first = self.linear.weight[0].to(dtype)
            self.seen.copy_(first * 2)
            self.seen[ids[:1] * 0] = self.linear.weight[1, :1] * 3
            return super().forward(ids) + self.seen

    model = Keeps()
    prepared = prepared_for(model, compiles)
    assert of_right_steps(prepared, model) == ["FULL", "NONE", "NONE", "NONE"]
    assert model.seen[0] == model.linear.weight[1, 0] * 3
