"""Models as engines write them: stages, heads, modalities, ranks, and what no graph can be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from piecegraph import errors

from .engine_parts import ATTENTION, POSITIONS, model, norm, ops

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


@model(refused=errors.TraceFailed, splits=())
def pairs_of_tokens(self, x):
    return x.view(-1, 2, 8).sum(1)  # here
