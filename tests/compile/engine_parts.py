"""Parts of models as engines write them: weights, ops, and the list of models.

`@model(…)` names the inputs beside `x` (num_tokens, 8) and the settings; `refused` is the error
that the model must raise, at the line marked `# here`. `splits` are the ops of the test library at
which its graph is split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import ops as _registers  # noqa: F401
from .ops import define

ops = torch.ops.piecegraph_test
ATTENTION = "piecegraph_test::mix"
X = {"x": "float32[num_tokens, 8]"}
POSITIONS = {"positions": "int64[num_tokens]"}


def _add_rms_norm(x, residual, weight):
    residual.add_(x)
    x.copy_(norm(residual, weight))


def _lora(x, rows, weights):
    return torch.stack([weights[int(i)] @ row for i, row in zip(rows, x, strict=True)])


def _experts(x, routes, up, name):
    out = torch.zeros_like(x)
    for i in range(len(up)):  # as a kernel does: tokens of each expert together
        rows = (routes == i).any(-1).nonzero().flatten()
        out[rows] += x[rows] @ up[i]
    return out


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


define(
    "add_rms_norm(Tensor(a!) x, Tensor(b!) residual, Tensor weight) -> ()",
    _add_rms_norm,
    lambda x, residual, weight: None,
)
define(
    "lora(Tensor x, Tensor rows, Tensor[] weights) -> Tensor",
    _lora,
    lambda x, rows, weights: torch.empty_like(x),
)
define(
    "experts(Tensor x, Tensor routes, Tensor up, str name) -> Tensor",
    _experts,
    lambda x, routes, up, name: torch.empty_like(x),
)
define("all_reduce(Tensor x) -> Tensor", lambda x: x * 2, lambda x: torch.empty_like(x))


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
        self.register_buffer("fp8", torch.randn(8, 8).to(torch.float8_e4m3fn))
        self.requires_grad_(False)
        self.wrapped = nn.Parameter(Int4Weight(self.int4, self.scales), requires_grad=False)
        self.states = {"bias": torch.randn(8)}
        self.multiplier = 0.22

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
    name: str
    forward: Callable[..., Any]
    inputs: dict[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = (ATTENTION,)
    refused: type[Exception] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self):
        return type(self.name, (Engine,), {"forward": self.forward})().eval()


MODELS = {}


def model(**given):
    names = ("splits", "refused", "settings")
    rest = {name: given.pop(name) for name in names if name in given}

    def add(forward):
        first = {} if given.pop("alone", False) else X
        made = Model(forward.__name__, forward, {**first, **given}, **rest)
        MODELS[forward.__name__] = made

    return add
