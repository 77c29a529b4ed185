"""Random models in random sequences of steps equal eager, bit for bit, in every mode and strategy.

Some of the models mix rows, depend on the padded size, keep state, or return views. All numbers are
small integers, so that every order of additions gives the same sum.
"""

import copy
import random

import pytest
import torch
from torch import nn

from piecegraph import (
    Batch,
    ForwardContext,
    GraphMode,
    forward_context,
    get_forward_context,
    prepare,
)

from .conftest import small_config, strict_backend
from .live.conftest import HIDDEN, MAX_TOKENS, starts_of

pytestmark = pytest.mark.compile

MODULUS, SLOTS = 97, 40
RESERVED = SLOTS - 1


def attend(x, out):
    """out[i] = the sum of the rows of i's request up to i; `starts` keeps its place."""
    starts = get_forward_context().layers["starts"][: len(x)]
    total = x.cumsum(0)
    out.copy_((total - total[starts] + x[starts]).remainder(MODULUS))


def attend_in_place(x):
    attend(x.clone(), x)


def attended(x):
    out = torch.empty_like(x)
    attend(x, out)
    return out


BLOCKS = {}


def block(fn):
    BLOCKS[fn.__name__] = fn
    return fn


@block
def scale(layer, x, ids, wide):
    return x * layer.weight + layer.table[ids.remainder(5)]


@block
def branch_free(layer, x, ids, wide):
    return torch.where(x > 40, x - 7, x + wide.sum(0)[:, None])


@block
def in_place(layer, x, ids, wide):
    y = x.clone()
    y.add_(3)
    y[:, 1:].mul_(2)
    return y


@block
def reshaped(layer, x, ids, wide):
    return torch.cat([x.view(-1, 2, 2).transpose(1, 2).reshape(-1, 4), x], -1)[:, ::2]


@block
def heads(layer, x, ids, wide):
    out = torch.empty(x.shape[0], 2, 2).view(-1, HIDDEN)
    torch.ops.random_models.attend(x, out)
    return x + out


@block
def op_in_place(layer, x, ids, wide):
    y = x + 1
    torch.ops.random_models.attend_in_place(y)
    return y


@block
def op_result(layer, x, ids, wide):
    return torch.ops.random_models.attended(x) + x


@block
def counted(layer, x, ids, wide):
    layer.steps.add_(1)
    return x + layer.steps


@block
def cached(layer, x, ids, wide):
    layer.cache.index_copy_(0, ids, x)
    return x + layer.cache[ids]


@block
def sized(layer, x, ids, wide):
    return x + x.shape[0]


@block
def pooled(layer, x, ids, wide):
    return x + x.sum(0)


@block
def last_row(layer, x, ids, wide):
    return x + x[-1]


@block
def flipped(layer, x, ids, wide):
    return x + x.flip(0)


RESULTS = [
    lambda x, ids: x,
    lambda x, ids: (x, x.sum(1)),
    lambda x, ids: {"x": x[:, :2], "ids": ids, "n": x.shape[0]},
    lambda x, ids: [x.t(), x],
    lambda x, ids: (x, x.sum(0)),
]
OPS = {
    "heads": "random_models::attend",
    "op_in_place": "random_models::attend_in_place",
    "op_result": "random_models::attended",
}
HARMLESS = ["scale", "branch_free", "in_place", "reshaped", "heads", "op_in_place", "op_result"]


class Layer(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = BLOCKS[block]
        self.weight = nn.Parameter(whole(HIDDEN), requires_grad=False)
        self.table = nn.Parameter(whole(5, HIDDEN), requires_grad=False)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(SLOTS, HIDDEN))

    def forward(self, x, ids, wide):
        return self.block(self, x, ids, wide).remainder(MODULUS)


class Model(nn.Module):
    def __init__(self, blocks, result):
        super().__init__()
        self.layers = nn.ModuleList(map(Layer, blocks))
        self.result = result

    def forward(self, x, ids, wide):
        for layer in self.layers:
            x = layer(x, ids, wide)
        return self.result(x, ids)


def whole(*shape):
    return torch.randint(1, 9, shape).float()


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    temporary_op("random_models::attend", "(Tensor x, Tensor(a!) out) -> ()", attend)
    temporary_op("random_models::attend_in_place", "(Tensor(a!) x) -> ()", attend_in_place)
    temporary_op("random_models::attended", "(Tensor x) -> Tensor", attended, torch.empty_like)


class Steps:
    """Steps of one model, prepared and eager, on states of their own."""

    def __init__(self, draw):
        self.draw = draw
        self.blocks = [
            draw.choice(draw.choice([HARMLESS, [*BLOCKS]])) for _ in range(draw.randint(2, 5))
        ]
        self.plain = Model(self.blocks, draw.choice(RESULTS))
        self.model = copy.deepcopy(self.plain)
        self.starts = torch.arange(MAX_TOKENS)
        self.wide = torch.zeros(3, MAX_TOKENS, dtype=torch.int64)
        self.facts = {
            "strategy": draw.choice(["eager", "delayed", "lazy"]),
            "graph_mode": draw.choice([str(mode) for mode in GraphMode]),
        }
        padding = {"ids": RESERVED, "x": draw.choice(["zero", "repeat", "keep", float("nan")])}
        self.facts["steps"] = {"padding": padding}
        self.what = f"{self.blocks} {self.facts}"
        read = "branch_free" in self.blocks
        buffers = {"wide": self.wide} if read and draw.random() < 0.5 else {}
        self.prepared = prepare(
            self.model, self.config(), layers={"starts": self.starts}, input_buffers=buffers,
            backend=strict_backend(poison_old_results=True),
        )  # fmt: skip
        self.prepared.capture()
        self.prepared.seal()

    def config(self):
        splits = tuple({OPS[name] for name in self.blocks if name in OPS})
        inputs = {"x": f"float32[num_tokens, {HIDDEN}]", "ids": "int64[num_tokens]"}
        inputs["wide"] = "int64[3, num_tokens]"
        given = {"splitting_ops": splits, "inputs": inputs, "capture_sizes": (2, 5, 8)}
        return small_config(MAX_TOKENS, **given, **self.facts)

    def step(self):
        decode = self.draw.random() < 0.5
        lengths = [1 if decode else self.draw.randint(1, 5) for _ in range(self.draw.randint(1, 5))]
        n = sum(lengths[:3]) if not decode else len(lengths)
        lengths = lengths if decode else lengths[:3]
        self.starts.copy_(starts_of(lengths))
        x = torch.randint(50, (n, HIDDEN)).float()
        if self.draw.random() < 0.3:
            x = torch.randint(50, (HIDDEN, n)).float().t()  # other strides
        ids = torch.randperm(RESERVED)[:n]
        self.wide[:, :n] = torch.randint(9, (3, n))
        arguments = x, ids, self.wide[:, :n]
        decode_facts = {"is_decode": True, "query_len": 1} if decode else {}
        got = self.prepared(*arguments, batch=Batch(n, len(lengths), **decode_facts))
        with forward_context(ForwardContext({"starts": self.starts})), torch.no_grad():
            wanted = self.plain(*arguments)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0)
        for (name, mine), other in zip(
            self.model.named_buffers(), self.plain.buffers(), strict=True
        ):
            rows = slice(RESERVED) if name.endswith("cache") else ...
            assert torch.equal(mine[rows], other[rows]), name

    def change(self):
        """Between two steps: new weights, a new layer, or graphs that are freed."""
        index = self.draw.randrange(len(self.plain.layers))
        match self.draw.randrange(3):
            case 0:
                self.plain.layers[index].weight = nn.Parameter(whole(HIDDEN), requires_grad=False)
                self.model.layers[index].weight = copy.deepcopy(self.plain.layers[index].weight)
                self.prepared.refresh()
            case 1:
                self.model.layers[index] = copy.deepcopy(self.plain.layers[index])
                self.prepared.refresh()
            case 2:
                self.prepared.release()
                self.prepared.capture()


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.heavy) for seed in range(4, 60))]
)
def test_random_steps_of_a_random_model_equal_eager(seed):
    torch.manual_seed(seed)
    steps = Steps(random.Random(seed))
    try:
        for number in range(12):
            if number % 5 == 4:
                steps.change()
            steps.step()
    except Exception as error:
        error.add_note(steps.what)
        raise
