"""Models as engines write them: layers, heads, stages, modalities.

`@model(…)` names the inputs, by default `x` (num_tokens, 8) alone. `splits` are the ops of the test
library at which its graph is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops as _registers  # noqa: F401
from .ops import define

ops = torch.ops.piecegraph_test
ATTENTION = "piecegraph_test::mix"
X = {"x": "float32[num_tokens, 8]"}


def _lora(x, rows, weights):
    return torch.stack([weights[int(i)] @ row for i, row in zip(rows, x, strict=True)])


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


define(
    "lora(Tensor x, Tensor rows, Tensor[] weights) -> Tensor",
    _lora,
    lambda x, rows, weights: torch.empty_like(x),
)


class Int4Weight(Tensor):
    """A weight of two tensors, as quantization libraries wrap them."""

    @staticmethod
    def __new__(cls, packed, scale):
        shape = (packed.shape[0], packed.shape[1] * 2)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)

    def __init__(self, packed, scale):
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self):
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Int4Weight(inner["packed"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Int4Weight(args[0].packed, args[0].scale)
        plain = [unpack(x.packed, x.scale) if isinstance(x, Int4Weight) else x for x in args]
        return func(*plain, **(kwargs or {}))


def unpack(packed, scale):
    low, high = (packed & 15) - 8, (packed >> 4) - 8
    return torch.stack([low, high], -1).flatten(1).to(scale.dtype) * scale


class Engine(nn.Module):
    """Weights from which the forwards take what they need."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, 8)
        self.qkv, self.o = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(16, 8)
        self.norm1, self.norm2 = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.latent, self.expand = nn.Linear(8, 6), nn.Linear(4, 16)
        self.fuse = nn.Linear(16, 8)
        self.head = nn.Linear(8, 64, bias=False)
        self.head.weight = self.embed.weight
        self.gate = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.adapters = nn.Parameter(torch.randn(3, 8, 8) / 3)
        self.patch = nn.Conv2d(3, 8, 4, stride=4)
        angles = torch.arange(64)[:, None] * 100.0 ** -torch.arange(0, 1, 0.25)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("cache", torch.zeros(80, 8), persistent=False)
        self.register_buffer("scales", torch.rand(8, 1) / 100)
        self.register_buffer("int4", torch.randint(0, 255, (8, 4), dtype=torch.uint8).int())
        self.requires_grad_(False)
        self.wrapped = nn.Parameter(Int4Weight(self.int4, self.scales), requires_grad=False)

    def attend(self, q, k, v, name="layers.0"):
        out = torch.empty_like(v)
        ops.mix(q * k + v, out, name)
        return out

    def layer(self, x, name="layers.0"):
        q, k, v = self.qkv(norm(x, self.norm1)).chunk(3, -1)
        x = x + self.o(self.attend(q, k, v, name))
        return x + self.mlp(norm(x, self.norm2))

    def mlp(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


@dataclass
class Model:
    forward: Callable[..., Any]
    inputs: dict[str, str]
    splits: tuple[str, ...]
    padding: dict[str, int]

    def build(self):
        return type(self.forward.__name__, (Engine,), {"forward": self.forward})().eval()


MODELS = {}


def model(inputs=X, *, splits=(ATTENTION,), padding=None):
    def add(forward):
        MODELS[forward.__name__] = Model(forward, inputs, splits, padding or {})

    return add


@model()
def rotary_op_in_place(self, x):
    q, k, v = (y.contiguous() for y in self.qkv(x).chunk(3, -1))
    ops.turn(q, k)
    return self.attend(q, k, v)


@model()
def mla_with_slice_assignment(self, x):
    latent, rope = self.latent(x).split([4, 2], -1)
    k, v = self.expand(latent).chunk(2, -1)
    k = k.clone()
    k[..., 6:] = rope
    return self.o(self.attend(x, k, v.contiguous()))


@model({**X, "rows": "int64[num_tokens]"}, splits=(ATTENTION, "piecegraph_test::lora"))
def lora_op_with_a_list(self, x, rows):
    return self.layer(x + ops.lora(x, rows, list(self.adapters.unbind())))


@model()
def experts_sorted(self, x):
    chosen = self.gate(x).argmax(-1)
    order = chosen.argsort()
    made = torch.einsum("td,tdf->tf", x[order], self.experts[chosen[order]])
    return self.layer(torch.empty_like(x).index_copy(0, order, made))


@model()
def int4_weights_as_a_subclass(self, x):
    return self.layer(F.linear(x, self.wrapped))


@model({**X, "slots": "int64[num_tokens]"}, padding={"slots": 79})
def cache_written_in_a_piece(self, x, slots):
    self.cache.index_copy_(0, slots, x)
    return self.layer(self.cache[slots])


@model({**X, "rows": "int64[num_reqs]"})
def rows_that_are_sampled(self, x, rows):
    return self.head(self.layer(x)[rows])


@model({f"stage.{name}": "float32[num_tokens, 8]" for name in ("hidden", "residual")})
def pipeline_stage(self, stage):
    y = self.layer(stage["hidden"] + stage["residual"])
    return {"hidden": norm(y, self.norm2), "residual": y}


@model({"images": "float32[num_tokens, 3, 8, 8]"}, splits=())
def vision_tower(self, images):
    patches = self.patch(images).flatten(2).transpose(1, 2)
    weights = (patches @ patches.transpose(1, 2)).softmax(-1)
    return self.mlp(weights @ patches)


@model(splits=(ATTENTION, "piecegraph_test::scan"))
def hybrid_of_two_ops(self, x):
    return self.layer(x + ops.scan(self.o(x), self.norm1.sigmoid(), "mixers.0"))


@model({"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"})
def tied_embeddings(self, input_ids, positions):
    return self.head(self.layer(self.embed(input_ids) * self.cos[positions].repeat(1, 2)))


@model(splits=())
def multi_token_heads(self, x):
    return tuple(self.head(self.fuse(torch.cat([x, x * i], -1))) for i in range(3))
