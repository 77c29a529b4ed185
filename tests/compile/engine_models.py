"""Models as engines write them, each as one forward over parts of `Engine`.

`@model(…)` names the inputs beside `x` (num_tokens, 8) and the settings; `refused` is the error
that the model must raise, at the line marked `# here`. `splits` are the ops of the test library at
which its graph is split.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecegraph import errors

from . import ops as _registers  # noqa: F401
from .ops import define

ops: Any = torch.ops.piecegraph_test
ATTENTION = "piecegraph_test::mix"
X = {"x": "float32[num_tokens, 8]"}
POSITIONS = {"positions": "int64[num_tokens]"}


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> None:
    residual.add_(x)
    x.copy_(norm(residual, weight))


def _lora(x: Tensor, rows: Tensor, weights: list[Tensor]) -> Tensor:
    return torch.stack([weights[int(i)] @ row for i, row in zip(rows, x, strict=True)])


def _experts(x: Tensor, routes: Tensor, up: Tensor, name: str) -> Tensor:
    out = torch.zeros_like(x)
    for i in range(len(up)):  # as a kernel does: tokens of each expert together
        rows = (routes == i).any(-1).nonzero().flatten()
        out[rows] += x[rows] @ up[i]
    return out


def norm(x: Tensor, weight: Tensor) -> Tensor:
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
    def __new__(cls, packed: Tensor, scale: Tensor) -> Int4Weight:
        shape = (packed.shape[0], packed.shape[1] * 2)
        return Tensor._make_wrapper_subclass(cls, shape, dtype=scale.dtype)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, packed: Tensor, scale: Tensor) -> None:
        self.packed, self.scale = packed, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> Int4Weight:
        return Int4Weight(inner["packed"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Int4Weight(args[0].packed, args[0].scale)
        plain = [unpack(x.packed, x.scale) if isinstance(x, Int4Weight) else x for x in args]
        return func(*plain, **(kwargs or {}))


def unpack(packed: Tensor, scale: Tensor) -> Tensor:
    low, high = (packed & 15) - 8, (packed >> 4) - 8
    return torch.stack([low, high], -1).flatten(1).to(scale.dtype) * scale


class Engine(nn.Module):
    """Weights from which the forwards take what they need."""

    def __init__(self) -> None:
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
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("kv_scale", torch.tensor(0.5))
        self.register_buffer("cache", torch.zeros(80, 8), persistent=False)
        self.register_buffer("int8", torch.randint(-127, 127, (8, 8), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(8, 1) / 100)
        self.register_buffer("int4", torch.randint(0, 255, (8, 4), dtype=torch.uint8).int())
        self.register_buffer("fp8", torch.randn(8, 8).to(torch.float8_e4m3fn))
        self.requires_grad_(False)
        self.wrapped = nn.Parameter(Int4Weight(self.int4, self.scales), requires_grad=False)
        self.states: dict[str, Any] = {"bias": torch.randn(8)}
        self.multiplier = 0.22

    def attend(self, q: Tensor, k: Tensor, v: Tensor, name: str = "layers.0") -> Tensor:
        out = torch.empty_like(v)
        ops.mix(q * k + v, out, name)
        return out

    def layer(self, x: Tensor, name: str = "layers.0") -> Tensor:
        q, k, v = self.qkv(norm(x, self.norm1)).chunk(3, -1)
        x = x + self.o(self.attend(q, k, v, name))
        return x + self.mlp(norm(x, self.norm2))

    def mlp(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)


@dataclass
class Model:
    name: str
    forward: Callable[..., Any]
    inputs: dict[str, str] = field(default_factory=dict)
    splits: tuple[str, ...] = (ATTENTION,)
    refused: type[Exception] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def build(self) -> Any:
        return type(self.name, (Engine,), {"forward": self.forward})().eval()


MODELS: dict[str, Model] = {}


def model(**given: Any) -> Callable[[Callable[..., Any]], None]:
    names = ("splits", "refused", "settings")
    rest = {name: given.pop(name) for name in names if name in given}

    def add(forward: Callable[..., Any]) -> None:
        first = {} if given.pop("alone", False) else X
        made = Model(forward.__name__, forward, {**first, **given}, **rest)
        MODELS[forward.__name__] = made

    return add


NO_SPLIT: dict[str, Any] = {"splits": ()}


# norms and residuals


@model()
def residual_in_pairs(self, x):
    residual = x
    for i in range(2):
        x = self.layer(norm(x, self.norm1), f"layers.{i}")
        residual = x + residual
        x = norm(residual, self.norm2)
    return x, residual


@model()
def residual_in_place(self, x):
    y = x * 1
    for i in range(2):
        y += self.layer(y, f"layers.{i}")
    return y


@model()
def fused_norm_in_place(self, x):
    y, residual = self.o(x), x.clone()
    ops.add_rms_norm(y, residual, self.norm1)
    y = self.attend(y, y, y)
    ops.add_rms_norm(y, residual, self.norm2)
    return y + residual


@model()
def sandwich_norms(self, x):
    x = x + norm(self.layer(norm(x, 1 + self.norm1)), 1 + self.norm2)
    return x * math.sqrt(8)


@model()
def parallel_attention_and_mlp(self, x):
    h = F.layer_norm(x, (8,), self.norm1)
    q, k, v = self.qkv(h).chunk(3, -1)
    return x + self.o(self.attend(q, k, v)) + self.mlp(h)


@model()
def hyper_connections(self, x):
    streams = x[:, None].expand(-1, 4, -1)
    mixed = (streams * self.gate(x).softmax(-1)[..., None]).sum(1)
    return (streams + self.layer(mixed)[:, None] * self.gate(mixed)[..., None]).mean(1)


@model()
def residual_multiplier(self, x):
    x = x + self.layer(x) * self.multiplier
    return torch.tanh(self.head(x) / 30.0) * 30.0


# rotary embeddings


@model(**POSITIONS)
def rotary_by_index_select(self, x, positions):
    cos, sin = (table.index_select(0, positions) for table in (self.cos, self.sin))
    q, k, v = self.qkv(x).chunk(3, -1)
    return self.attend(self.rotate(q, cos, sin), self.rotate(k, cos, sin), v)


@model(**POSITIONS)
def rotary_complex(self, x, positions):
    turns = torch.polar(torch.ones_like(self.angles), self.angles)[positions]
    q, k, v = self.qkv(x).chunk(3, -1)
    q, k = (torch.view_as_real(torch.view_as_complex(y.view(-1, 4, 2)) * turns).flatten(1)
            for y in (q, k))  # fmt: skip
    return self.attend(q, k, v)


@model()
def rotary_op_in_place(self, x):
    q, k, v = (y.contiguous() for y in self.qkv(x).chunk(3, -1))
    ops.turn(q, k)
    return self.attend(q, k, v)


@model(positions="int64[3, num_tokens]")
def m_rope(self, x, positions):
    cos, sin = self.cos[positions], self.sin[positions]
    parts = [torch.cat([t[i, :, a:b] for i, (a, b) in enumerate(((0, 2), (2, 3), (3, 4)))], -1)
             for t in (cos, sin)]  # fmt: skip
    q, k, v = self.qkv(x).chunk(3, -1)
    return self.attend(self.rotate(q, *parts), self.rotate(k, *parts), v)


@model(**POSITIONS)
def rope_scaled_in_forward(self, x, positions):
    frequencies = self.angles[1] / torch.where(self.angles[1] < 0.2, 8.0, 1.0)
    angles = positions[:, None].float() * frequencies
    q, k, v = self.qkv(x).chunk(3, -1)
    return self.attend(self.rotate(q, angles.cos(), angles.sin()), k, v)


@model(**POSITIONS)
def temperature_of_positions(self, x, positions):
    scale = torch.log1p(torch.floor((positions + 1.0) / 8)) * 0.1 + 1.0
    return self.layer(x * scale[:, None])


@model()
def query_and_key_norms(self, x):
    q, k, v = self.qkv(x).view(-1, 3, 2, 4).unbind(1)
    q, k = (F.normalize(y, dim=-1) for y in (q, k))
    return self.attend(q.flatten(1), k.flatten(1), v.reshape(-1, 8))


# latent attention


@model()
def mla_with_slice_assignment(self, x):
    latent, rope = self.latent(x).split([4, 2], -1)
    k, v = self.expand(latent).chunk(2, -1)
    k = k.clone()
    k[..., 6:] = rope
    return self.o(self.attend(x, k, v.contiguous()))


@model()
def mla_absorbed(self, x):
    latent, _ = self.latent(x).split([4, 2], -1)
    absorb = self.expand.weight.view(2, 2, 4, 4)
    q = torch.einsum("thd,hdc->thc", x.view(-1, 2, 4), absorb[0])
    out = self.attend(q.flatten(1), q.flatten(1), latent.repeat(1, 2))
    return torch.einsum("thc,hdc->thd", out.view(-1, 2, 4), absorb[1]).flatten(1)


@model(rows="int64[num_tokens]")
def lora_by_index(self, x, rows):
    return self.layer(x + torch.bmm(self.adapters[rows], x[..., None])[..., 0])


@model(rows="int64[num_tokens]", splits=(ATTENTION, "piecegraph_test::lora"))
def lora_op_with_a_list(self, x, rows):
    return self.layer(x + ops.lora(x, rows, list(self.adapters.unbind())))


@model(rows="int64[num_tokens]")
def lora_by_mask(self, x, rows):
    delta = sum((rows == i)[:, None] * (x @ self.adapters[i]) for i in range(3))
    return self.layer(x + delta)


# experts


@model()
def experts_all_of_them(self, x):
    weights, chosen = self.gate(x).softmax(-1).topk(2)
    full = torch.zeros_like(self.gate(x)).scatter(-1, chosen, weights)
    return self.layer(torch.einsum("te,td,edf->tf", full, x, self.experts))


@model()
def experts_gathered(self, x):
    weights, chosen = self.gate(x).softmax(-1).topk(2)
    made = torch.einsum("td,tkdf->tkf", x, self.experts[chosen])
    return self.layer((made * weights[..., None]).sum(1))


@model(splits=(ATTENTION, "piecegraph_test::experts"))
def experts_as_splitting_op(self, x):
    return self.layer(ops.experts(x, self.gate(x).topk(2).indices, self.experts, "moe"))


@model()
def experts_sorted(self, x):
    chosen = self.gate(x).argmax(-1)
    order = chosen.argsort()
    made = torch.einsum("td,tdf->tf", x[order], self.experts[chosen[order]])
    return self.layer(torch.empty_like(x).index_copy(0, order, made))


@model()
def shared_expert_with_gate(self, x):
    return self.layer(self.mlp(x) * self.gate(x)[:, :1].sigmoid())


@model(refused=errors.TraceFailed, splits=())
def experts_in_a_loop(self, x):
    out = torch.zeros_like(x)
    chosen = self.gate(x).argmax(-1)
    for i in range(4):
        rows = (chosen == i).nonzero().flatten()
        if len(rows):  # here
            out[rows] = x[rows] @ self.experts[i]
    return out


# weights of other dtypes


@model()
def int8_weights(self, x):
    return self.layer(F.linear(x, self.int8.to(x.dtype) * self.scales))


@model(splits=())
def int8_activations(self, x):
    scale = x.abs().amax(-1, keepdim=True) / 127 + 1e-6
    made = torch._int_mm((x / scale).round().to(torch.int8), self.int8.t())
    return made.to(x.dtype) * scale * self.scales.t()


@model()
def int4_weights(self, x):
    return self.layer(F.linear(x, unpack(self.int4, self.scales)))


@model()
def int4_weights_as_a_subclass(self, x):
    return self.layer(F.linear(x, self.wrapped))


@model()
def fp8_weights(self, x):
    return self.layer(F.linear(x, self.fp8.to(x.dtype) * self.scales))


@model()
def fp8_activations(self, x):
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-6) / 448
    return self.layer((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale)


@model()
def bfloat16_inside(self, x):
    return self.layer(x).to(torch.bfloat16).mul(3).to(x.dtype)


@model()
def scale_of_the_cache(self, x):
    return self.attend(x, x / self.kv_scale, x / float(self.multiplier)) * self.kv_scale


@model(slots="int64[num_tokens]", settings={"padding": {"slots": 79}})
def cache_written_in_a_piece(self, x, slots):
    self.cache.index_copy_(0, slots, x)
    return self.layer(self.cache[slots])


# embeddings, heads, stages


@model(alone=True, input_ids="int64[num_tokens]", **POSITIONS)
def tied_embeddings(self, input_ids, positions):
    return self.head(self.layer(self.embed(input_ids) * self.cos[positions].repeat(1, 2)))


@model(alone=True, input_ids="int64[num_tokens]")
def vocabulary_of_a_rank(self, input_ids):
    here = (input_ids >= 16) & (input_ids < 48)
    rows = F.embedding((input_ids - 16) * here, self.embed.weight[16:48])
    return self.layer(ops.all_reduce(rows * here[:, None]))


@model(rows="int64[num_reqs]")
def rows_that_are_sampled(self, x, rows):
    return self.head(self.layer(x)[rows])


@model(targets="int64[num_tokens]")
def logprobs_of_the_prompt(self, x, targets):
    return self.head(self.layer(x)).log_softmax(-1).gather(1, targets[:, None]), x.argmax(-1)


@model(alone=True, input_ids="int64[num_tokens]", hidden="float32[num_tokens, 8]")
def eagle_draft(self, input_ids, hidden):
    return self.layer(self.fuse(torch.cat([self.embed(input_ids), hidden], -1)))


@model()
def hidden_states_for_a_draft(self, x):
    states = [x]
    for i in range(3):
        states.append(self.layer(states[-1], f"layers.{i}"))
    return states[-1], states[1:3]


@model(**{"stage.hidden": "float32[num_tokens, 8]"}, **{"stage.residual": "float32[num_tokens, 8]"},
       alone=True)  # fmt: skip
def pipeline_stage(self, stage):
    y = self.layer(stage["hidden"] + stage["residual"])
    return {"hidden": norm(y, self.norm2), "residual": y}


class States(NamedTuple):
    hidden: Tensor
    residual: Tensor


@dataclass
class Output:
    hidden: Tensor
    states: States | None = None


@model()
def dataclass_of_a_named_tuple(self, x):
    y = self.layer(x)
    return Output(y, States(x * 2, y + 1))


@model(splits=())
def multi_token_heads(self, x):
    return tuple(self.head(self.fuse(torch.cat([x, x * i], -1))) for i in range(3))


@model(layer_inputs="float32[num_tokens, 2, 8]")
def inputs_of_each_layer(self, x, layer_inputs):
    for i in range(2):
        x = self.layer(x + layer_inputs[:, i] * self.gate(x)[:, i : i + 1], f"layers.{i}")
    return x


# several modalities


@model(images="float32[num_tokens, 3, 8, 8]", alone=True, splits=())
def vision_tower(self, images):
    patches = self.patch(images).flatten(2).transpose(1, 2)
    weights = (patches @ patches.transpose(1, 2)).softmax(-1)
    return self.mlp(weights @ patches)


@model(image="float32[num_image_tokens, 8]", places="int64[num_image_tokens]")
def image_rows_in_text(self, x, image, places):
    return self.layer(x.index_copy(0, places, self.o(image)))


@model(mask="bool[num_tokens]")
def image_mask(self, x, mask):
    return self.layer(torch.where(mask[:, None], self.o(x), x))


@model(image="float32[num_image_tokens, 8]")
def cross_attention(self, x, image):
    weights = (self.o(x) @ image.t()).softmax(-1)
    return self.layer(x + weights @ image)


# states of recurrences


@model(splits=(ATTENTION, "piecegraph_test::scan"))
def hybrid_of_two_ops(self, x):
    return self.layer(x + ops.scan(self.o(x), self.norm1.sigmoid(), "mixers.0"))


@model()
def one_layer_four_times(self, x):
    for _ in range(4):
        x = self.layer(x)
    return x


@model()
def layers_of_different_widths(self, x):
    y = self.layer(x)
    return self.layer(self.fuse(self.up(y)[:, :16]), "layers.1")


# parallel ranks


@model(splits=(ATTENTION, "piecegraph_test::all_reduce"))
def tensor_parallel(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    x = x + ops.all_reduce(self.o(self.attend(q, k, v)))
    return x + ops.all_reduce(self.mlp(x))


@model()
def tensor_parallel_inside(self, x):
    return ops.all_reduce(self.layer(ops.all_reduce(x)))


# what surrounds a forward


@model()
def autocast_around_layers(self, x):
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        return self.layer(x)


@model()
def tensor_in_a_dict(self, x):
    return self.layer(x) + self.states["bias"]


@model()
def branch_on_settings(self, x):
    return self.layer(x) if self.multiplier and os.environ.get("HOME", "") else x


@model(settings={"dynamic_shapes": "unbacked"})
def unbacked_sizes(self, x):
    return self.layer(x) * x.shape[0]


# what no graph of tokens can be


@model(refused=errors.TraceFailed, splits=())
def branch_on_data(self, x):
    if x.sum() > 0:  # here
        return x * 2
    return x


@model(refused=errors.HostRead, splits=())
def value_on_the_host(self, x):
    return x * x[0, 0].item()  # here


@model(refused=errors.TraceFailed, splits=())
def prints(self, x):
    print(x.shape)  # here
    return x


@model(refused=errors.GuardUnproved, splits=())
def branch_on_the_number_of_tokens(self, x):
    return x * 2 if x.shape[0] % 8 == 0 else x  # here


@model(refused=errors.TraceFailed, splits=())
def pairs_of_tokens(self, x):
    return x.view(-1, 2, 8).sum(1)  # here


@model(refused=errors.Specialized, splits=())
def loop_over_tokens(self, x):
    rows = [x[i] * i for i in range(x.shape[0])]  # here
    return torch.stack(rows)
