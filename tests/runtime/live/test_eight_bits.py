"""Integers of 8 bits: as others where they are flags and counters, by rounding where quantized."""

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.compile.guards.tolerance import compare
from piecegraph.runtime.parts.proof.op_rows import beyond, other_size, same_size

from ..conftest import captured

pytestmark = pytest.mark.compile

DTYPES = [torch.int8, torch.uint8, torch.int32]


class Keeps(nn.Module):
    """Marks or counts what it is given; padding is row 0."""

    def __init__(self, dtype, write):
        super().__init__()
        self.rows = nn.Embedding(16, 8)
        self.register_buffer("kept", torch.zeros(16, dtype=dtype))
        self.write = write
        self.requires_grad_(False)

    def forward(self, ids):
        self.write(self.kept, ids)
        return self.rows(ids)


def mark(kept, ids):
    kept[ids] = 1


def count(kept, ids):
    kept.index_add_(0, ids, torch.ones_like(ids, dtype=kept.dtype))


def mark_in_front(kept, ids):
    kept[torch.arange(ids.shape[0])] = 1


class Quantizes(nn.Module):
    """With a gate of all rows, which changes some of 256 values."""

    def __init__(self, dtype):
        super().__init__()
        self.rows = nn.Embedding(16, 8)
        self.dtype = dtype
        self.requires_grad_(False)
        self.rows.weight[0] *= 6

    def forward(self, ids):
        rows = self.rows(ids)
        gate = 1 + 0.05 * torch.sigmoid(rows.abs().mean() * 4 - 4)
        return (rows.abs() * 20 * gate).round().to(self.dtype)


def prepared_for(model, compiles):
    inputs = {"ids": "int64[num_tokens]"}
    return captured(model, 16, inputs=inputs, capture_sizes=(4, 8), compile=compiles)


def steps(prepared):
    for num_tokens in (8, 7, 3, 1):
        ids = torch.randint(1, 16, (num_tokens,))
        decision = prepared.dispatch(pg.Batch(num_tokens, num_tokens))
        yield ids, prepared.run(decision, ids)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("write", [mark, count, mark_in_front])
def test_what_padding_writes_is_found(write, dtype, compiles):
    model, other = Keeps(dtype, write), Keeps(dtype, write)
    other.load_state_dict(model.state_dict())
    for ids, result in steps(prepared_for(model, compiles)):
        torch.testing.assert_close(result, other(ids))
        torch.testing.assert_close(model.kept, other.kept)


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_padding_changes_by_few_of_their_values_are_found(dtype, compiles):
    model = Quantizes(dtype)
    for ids, result in steps(prepared_for(model, compiles)):
        torch.testing.assert_close(result, model(ids))


def test_memory_that_a_model_leaves_is_left():
    """By a thousandth of what is beside it, in each step."""

    def drift(kept, ids):
        kept[torch.arange(ids.shape[0])] += 1e-3

    model, other = Keeps(torch.float32, drift), Keeps(torch.float32, drift)
    other.load_state_dict(model.state_dict())
    for each in (model, other):
        each.kept.fill_(1.0)
    for ids, _ in steps(prepared_for(model, compiles=True)):
        other(ids)
        torch.testing.assert_close(model.kept, other.kept, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("limit", "seen"), [(same_size, 1), (other_size, 3)])
def test_rows_differ_by_their_values(limit, seen):
    rows = torch.randint(-60, 60, (4, 8), dtype=torch.int8)
    for apart in range(5):
        assert bool(beyond(rows, rows + apart, limit).any()) == (apart >= seen)


@pytest.mark.parametrize("quantized", [True, False])
def test_a_step_of_which_integers_of_8_bits_differ_is_right_only_by_rounding(quantized):
    values = torch.linspace(-3, 3, 512).view(8, 64)

    def run():
        scaled = values * 20 if quantized else (values > 0).float()
        return scaled.round().to(torch.int8)

    other = run()
    other[0, 0] += 20 if quantized else 1
    near = (values * 20 * (1 + 2e-7)).round().to(torch.int8) if quantized else run()
    assert compare(run(), near, run) is None
    assert compare(run(), other, run) is not None
