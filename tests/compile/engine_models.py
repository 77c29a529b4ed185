"""Models as engines write them: layers, stages, modalities, ranks, and what no graph can be.

What torch alone decides, such as the forms of norms and rotary embeddings, is in test_hf.py.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from piecegraph import errors

from .engine_parts import ATTENTION, POSITIONS, model, norm, ops

# layers


@model()
def fused_norm_in_place(self, x):
    y, residual = self.o(x), x.clone()
    ops.add_rms_norm(y, residual, self.norm1)
    y = self.attend(y, y, y)
    ops.add_rms_norm(y, residual, self.norm2)
    return y + residual


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


@model(rows="int64[num_tokens]", splits=(ATTENTION, "piecegraph_test::lora"))
def lora_op_with_a_list(self, x, rows):
    return self.layer(x + ops.lora(x, rows, list(self.adapters.unbind())))


@model(splits=(ATTENTION, "piecegraph_test::experts"))
def experts_as_splitting_op(self, x):
    return self.layer(ops.experts(x, self.gate(x).topk(2).indices, self.experts, "moe"))


@model()
def experts_sorted(self, x):
    chosen = self.gate(x).argmax(-1)
    order = chosen.argsort()
    made = torch.einsum("td,tdf->tf", x[order], self.experts[chosen[order]])
    return self.layer(torch.empty_like(x).index_copy(0, order, made))


@model(refused=errors.TraceFailed, splits=())
def experts_in_a_loop(self, x):
    out = torch.zeros_like(x)
    chosen = self.gate(x).argmax(-1)
    for i in range(4):
        rows = (chosen == i).nonzero().flatten()
        if len(rows):  # here
            out[rows] = x[rows] @ self.experts[i]
    return out


@model()
def int4_weights_as_a_subclass(self, x):
    return self.layer(F.linear(x, self.wrapped))


@model()
def fp8_weights(self, x):
    return self.layer(F.linear(x, self.fp8.to(x.dtype) * self.scales))


@model(slots="int64[num_tokens]", settings={"steps": {"padding": {"slots": 79}}})
def cache_written_in_a_piece(self, x, slots):
    self.cache.index_copy_(0, slots, x)
    return self.layer(self.cache[slots])


# embeddings, heads, stages


@model(alone=True, input_ids="int64[num_tokens]", **POSITIONS)
def tied_embeddings(self, input_ids, positions):
    return self.head(self.layer(self.embed(input_ids) * self.cos[positions].repeat(1, 2)))


@model(rows="int64[num_reqs]")
def rows_that_are_sampled(self, x, rows):
    return self.head(self.layer(x)[rows])


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


# several modalities


@model(images="float32[num_tokens, 3, 8, 8]", alone=True, splits=())
def vision_tower(self, images):
    patches = self.patch(images).flatten(2).transpose(1, 2)
    weights = (patches @ patches.transpose(1, 2)).softmax(-1)
    return self.mlp(weights @ patches)


@model(image="float32[num_image_tokens, 8]", places="int64[num_image_tokens]")
def image_rows_in_text(self, x, image, places):
    return self.layer(x.index_copy(0, places, self.o(image)))


# states of recurrences


@model(splits=(ATTENTION, "piecegraph_test::scan"))
def hybrid_of_two_ops(self, x):
    return self.layer(x + ops.scan(self.o(x), self.norm1.sigmoid(), "mixers.0"))


@model()
def one_layer_four_times(self, x):
    for _ in range(4):
        x = self.layer(x)
    return x


# parallel ranks


@model(splits=(ATTENTION, "piecegraph_test::all_reduce"))
def tensor_parallel(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    x = x + ops.all_reduce(self.o(self.attend(q, k, v)))
    return x + ops.all_reduce(self.mlp(x))


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


@model(settings={"tracing": {"dynamic_shapes": "unbacked"}})
def unbacked_sizes(self, x):
    return self.layer(x) * x.shape[0]


# what no graph of tokens can be


@model(refused=errors.HostRead, splits=())
def value_on_the_host(self, x):
    return x * x[0, 0].item()  # here


@model(refused=errors.GuardUnproved, splits=())
def branch_on_the_number_of_tokens(self, x):
    return x * 2 if x.shape[0] % 8 == 0 else x  # here


@model(refused=errors.GuardUnproved, splits=())
def pairs_of_tokens(self, x):
    return x.view(-1, 2, 8).sum(1)  # here
