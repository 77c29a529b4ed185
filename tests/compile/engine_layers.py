"""Layers as engines write them: norms, rotary embeddings, attention, experts, quantized weights."""

import math

import torch
from torch.nn import functional as F

from piecegraph import errors

from .engine_parts import ATTENTION, POSITIONS, model, norm, ops, unpack

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


@model(slots="int64[num_tokens]", settings={"steps": {"padding": {"slots": 79}}})
def cache_written_in_a_piece(self, x, slots):
    self.cache.index_copy_(0, slots, x)
    return self.layer(self.cache[slots])
