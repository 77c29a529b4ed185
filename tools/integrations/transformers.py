"""Hugging Face models with the library: their attention becomes one splitting op.

`adapt` routes the attention of a transformers model to `piecegraph_hf::attention`; `PackedModel`
takes the tokens of all requests in one row. For each layer the op calls a function from the forward
context, by default `attend_packed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ... import get_forward_context
from ...errors import MissingMetadata

SPLITTING_OP = "piecegraph_hf::attention"
INPUTS = {"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"}

# Arguments that models pass to every attention function and that change no score.
_HARMLESS = {"position_ids", "use_cache"}

LIBRARY: Any = torch.library.Library("piecegraph_hf", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name,"
    " float scale, bool causal, int window, float softcap) -> ()"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are computed; 0 turns `window` or `softcap` off."""

    scale: float
    causal: bool
    window: int
    softcap: float


@dataclass(frozen=True, slots=True)
class PackedRequests:
    """Metadata of a step: the number of tokens of each request, in order."""

    query_lens: tuple[int, ...]


class PackedModel(nn.Module):
    """A base model over packed tokens: two (T,) int64 tensors to hidden states (T, hidden)."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = adapt(model)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        result = self.model(input_ids=input_ids[None], position_ids=positions[None])
        hidden: Tensor = result.last_hidden_state
        return hidden[0]


def adapt(model: PreTrainedModel) -> PreTrainedModel:
    """Route the attention of `model` through the op, in inference; returns `model` itself."""
    AttentionInterface.register("piecegraph", _attend)
    AttentionMaskInterface.register("piecegraph", lambda *args, **kwargs: None)
    model.set_attn_implementation("piecegraph")
    model.config.use_cache = False
    for name, module in model.named_modules():
        module.layer_name = name
    return model.eval().requires_grad_(False)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers; `query`, `key`, `value`: (1, heads, T, head_dim).

    Raises NotImplementedError for an argument that would change the result, such as `s_aux`.
    """
    others["attention_mask"] = attention_mask
    for name, given in others.items():
        if given is not None and name not in _HARMLESS:
            # in a trace: Dynamo cannot follow the constructor of the errors of our own tree
            raise NotImplementedError(
                f"attention with {name}: route this model's attention to an op of your own instead"
                " of `adapt`, and name it in Config.splitting_ops"
            )
    query, key, value = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    output = torch.empty_like(query)
    torch.ops.piecegraph_hf.attention(
        query,
        key,
        value,
        output,
        module.layer_name,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        bool(getattr(module, "is_causal", True) if is_causal is None else is_causal),
        sliding_window or 0,
        softcap or 0.0,
    )
    return output[None], None


def _run(query: Tensor, key: Tensor, value: Tensor, output: Tensor, name: str, *rule: Any) -> None:
    """The op: `query`, `output` (T, heads, head_dim), `key`, `value` (T, kv_heads, head_dim)."""
    context = get_forward_context()
    if context.metadata is None:
        raise MissingMetadata(layer_name=name)
    layer = context.layers.get(name, attend_packed)
    layer(query, key, value, output, Rule(*rule), context.metadata)


LIBRARY.impl("attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("piecegraph_hf::attention", lambda *args: None, lib=LIBRARY)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, rule: Rule, metadata: PackedRequests
) -> None:
    """Each request over its own tokens of this step; rows beyond the last request become 0."""
    group = query.shape[1] // key.shape[1]
    start = 0
    for length in metadata.query_lens:
        rows = slice(start, start + length)
        q = query[rows].transpose(0, 1)
        k, v = (x[rows].repeat_interleave(group, 1).transpose(0, 1) for x in (key, value))
        scores = (q @ k.transpose(1, 2)).float() * rule.scale
        if rule.softcap:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        scores = scores.masked_fill(_hidden(length, rule, query.device), float("-inf"))
        output[rows] = (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1)
        start += length
    output[start:] = 0


def _hidden(length: int, rule: Rule, device: torch.device) -> Tensor:
    """Which of (query, key) pairs may not see each other: (length, length)."""
    distance = torch.arange(length, device=device)
    distance = distance[:, None] - distance
    if not rule.causal:
        return distance.abs() >= rule.window if rule.window else distance.isinf()
    return (distance < 0) | (distance >= rule.window) if rule.window else distance < 0
