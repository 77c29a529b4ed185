"""The op that stands for the attention of transformers models, and what it does by default."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .... import get_forward_context
from ....errors import MissingMetadata

SPLITTING_OP = "piecegraph_hf::attention"

LIBRARY: Any = torch.library.Library("piecegraph_hf", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? sinks, Tensor? bias,"
    " Tensor? indices, Tensor(a!) output, str layer_name, float scale, bool causal, int window,"
    " int chunk, float softcap) -> ()"
)


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: with `window` those nearer than that, with `chunk` those of its own
    chunk of the request; 0 turns either off."""

    causal: bool
    window: int = 0
    chunk: int = 0


ALL_SEEN = Mask(causal=False)


class UnknownMask(Exception):
    """A mask that the op cannot express; the message says which."""


class UnknownAttention(Exception):
    """Attention that the op cannot compute; `layer` could be a mixer instead."""

    def __init__(self, reason: str, layer: str) -> None:
        super().__init__(reason)
        self.layer = layer


def mask_of(function: Callable[..., Any], mask: Mask = ALL_SEEN) -> Mask:
    """`mask` and what `function` adds to it; raises UnknownMask.

    That requests do not see each other is left to the op, and so are positions inside requests.
    """
    name = getattr(function, "__qualname__", repr(function))
    if function.__module__ != "transformers.masking_utils":
        raise UnknownMask(f"{function.__module__}.{name}")
    cells = inspect.getclosurevars(function).nonlocals
    match name.removesuffix(".<locals>.inner_mask"):
        case "causal_mask_function":
            return replace(mask, causal=True)
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return mask
        case "sliding_window_overlay":
            return replace(mask, window=cells["sliding_window"])
        case "sliding_window_bidirectional_overlay":
            return replace(mask, window=cells["sliding_window"] + 1)
        case "chunked_overlay":
            return replace(mask, chunk=cells["chunk_size"])
        case "remap_positions_for_packed_sequence":
            return mask_of(cells["mask_function"], mask)
        case "and_masks.<locals>.and_mask":
            for each in cells["mask_functions"]:
                mask = mask_of(each, mask)
            return mask
        case "or_masks.<locals>.or_mask" if mask == ALL_SEEN:
            return _mask_like(function)
    raise UnknownMask(name.partition(".")[0])


def _mask_like(function: Callable[..., Any]) -> Mask:
    """The mask that hides what `function` hides, from its values around all of its integers."""
    values = list(_closed_over(function))
    numbers = {0, *(n for n in values if type(n) is int)}
    if not any(isinstance(x, Tensor) for x in values):  # else it depends on the tokens
        keys = torch.arange(2 * max(numbers) + 4)
        places = torch.tensor([0, len(keys) // 2, len(keys) - 1])
        seen = torch.stack([function(keys[0], keys[0], q, keys).expand(len(keys)) for q in places])
        for causal, window in itertools.product((True, False), sorted(numbers)):
            mask = Mask(causal, window)
            if torch.equal(seen, ~hidden_keys(places, keys, mask)):
                return mask
    raise UnknownMask("or_masks")


def _closed_over(function: Callable[..., Any]) -> Iterator[Any]:
    """What a function of masks was made of, at any depth."""
    for value in inspect.getclosurevars(function).nonlocals.values():
        for each in value if isinstance(value, (tuple, list)) else (value,):
            yield from _closed_over(each) if inspect.isfunction(each) else (each,)


@dataclass(frozen=True, slots=True)
class Rule:
    """How scores are computed; 0 turns `window`, `softcap` or `chunk` off.

    `sinks` has for each head a score that takes part in the softmax and has no value. `bias`
    (heads, T, T) is added to the scores. `indices` (T, n) are the keys that each token sees,
    counted from the first token of its request; -1 stands for none.
    """

    scale: float
    causal: bool
    window: int
    softcap: float
    chunk: int = 0
    sinks: Tensor | None = None
    bias: Tensor | None = None
    indices: Tensor | None = None

    def of_rows(self, rows: slice) -> Rule:
        """The rule of one request, whose tokens are `rows` of the step."""
        if self.bias is None and self.indices is None:
            return self
        bias = None if self.bias is None else self.bias[:, rows, rows]
        return replace(
            self, bias=bias, indices=None if self.indices is None else self.indices[rows]
        )


@dataclass(frozen=True, slots=True)
class PackedRequests:
    """Metadata of a step: the number of tokens of each request, in order."""

    query_lens: tuple[int, ...]


def given(arguments: dict[str, Any]) -> list[str]:
    """The names of arguments that are not None."""
    return [name for name, value in arguments.items() if value is not None]


def packed(
    query: Tensor, key: Tensor, value: Tensor, one_row: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows of all requests, (tokens, heads, head_dim), and memory for what attention gives.

    Each is (batch, heads, T, head_dim). Which dimension is one and which changes is known from the
    trial: asking for the size of a batch of images would put a guard on it.
    """
    q, k, v = (
        x[0].transpose(0, 1) if one_row else x.transpose(1, 2).flatten(0, 1)
        for x in (query, key, value)
    )
    return q, k, v, q.new_empty((*q.shape[:2], v.shape[2]))


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers; `query`, `key`, `value`: (batch, heads, T, head_dim).

    Each row of a batch is a request. What the mask says is known from `adapt`, and that other
    arguments change no result. Raises NotImplementedError for those that were not there then.
    """
    if not module.mask_stand_in:
        others["attention_mask"] = attention_mask
    if names := [name for name in given(others) if name not in module.other_arguments]:
        # in a trace: Dynamo cannot follow the constructor of the errors of our own tree
        raise NotImplementedError(f"attention with {names}, which `adapt` has not seen")
    rows, tokens = query.shape[0], query.shape[2]
    one_row: bool = module.one_row
    if one_row and rows != 1:
        raise NotImplementedError("attention of a batch, where `adapt` has seen a single row")
    query, key, value, output = packed(query, key, value, one_row)
    mask: Mask = module.attention_mask_rule
    torch.ops.piecegraph_hf.attention(
        query,
        key,
        value,
        s_aux,
        None if position_bias is None else position_bias[0],
        None if indices is None else indices[0],
        output,
        module.layer_name,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask.causal,
        mask.window,
        mask.chunk,
        softcap or 0.0,
    )
    return output.view(rows, tokens, *output.shape[1:]), None


def outside_mixers(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as an attention function; attention in a mixer, which runs for one request, is the
    model's own."""

    def attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not getattr(module, "in_mixer", False):
            return function(module, *args, **kwargs)
        forward = inspect.unwrap(type(module).forward)
        own = forward.__globals__["eager_attention_forward"]
        return own(module, *args, **kwargs)[0], None  # weights would be rows of a second result

    return attention


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    bias: Tensor | None,
    indices: Tensor | None,
    output: Tensor,
    name: str,
    scale: float,
    causal: bool,
    window: int,
    chunk: int,
    softcap: float,
) -> None:
    """The op: `query`, `output` (T, heads, head_dim), `key`, `value` (T, kv_heads, head_dim)."""
    context = get_forward_context()
    if context.metadata is None:
        raise MissingMetadata(layer_name=name)
    layer = context.layers.get(name, attend_packed)
    rule = Rule(scale, causal, window, softcap, chunk, sinks, bias, indices)
    layer(query, key, value, output, rule, context.metadata)


LIBRARY.impl("attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("piecegraph_hf::attention", lambda *args: None, lib=LIBRARY)


def rows_of(query_lens: Sequence[int]) -> Iterator[slice]:
    """The rows of each request of a step."""
    for length, end in zip(query_lens, itertools.accumulate(query_lens), strict=True):
        yield slice(end - length, end)


def attend_packed(
    query: Tensor, key: Tensor, value: Tensor, output: Tensor, rule: Rule, metadata: PackedRequests
) -> None:
    """Each request over its own tokens of this step; rows beyond the last request become 0."""
    for rows in rows_of(metadata.query_lens):
        output[rows] = attend_request(query[rows], key[rows], value[rows], rule.of_rows(rows))
    output[sum(metadata.query_lens) :] = 0


def attend_request(query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
    """The last tokens of a request over all of its tokens: `query` (Q, heads, dim), `key` and
    `value` (C, kv_heads, dim) to (Q, heads, value dim)."""
    context = len(key)
    keys = torch.arange(context, device=query.device)
    hidden = hidden_keys(keys[context - len(query) :], keys, rule)
    if rule.indices is not None:
        hidden |= not_selected(rule.indices, context)
    return weighted(query, key, value, hidden, rule)


def weighted(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, rule: Rule) -> Tensor:
    """Attention over the keys that are not `hidden`: `query` (…, Q, heads, dim), `key` and `value`
    (…, C, kv_heads, dim) to (…, Q, heads, value dim). Finite also where all keys are hidden."""
    group = query.shape[-2] // key.shape[-2]
    q = query.transpose(-3, -2)
    k, v = (x.repeat_interleave(group, -2).transpose(-3, -2) for x in (key, value))
    scores = (q @ k.transpose(-2, -1)).float() * rule.scale
    if rule.bias is not None:
        scores = scores + rule.bias
    if rule.softcap:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if rule.sinks is not None:
        sinks = rule.sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : k.shape[-2]].to(v.dtype)
    return (weights @ v).transpose(-3, -2)


def hidden_keys(queries: Tensor, keys: Tensor, mask: Mask | Rule) -> Tensor:
    """Which of the keys at places `keys` a token at each of `queries` may not see."""
    queries = queries[:, None]
    distance = queries - keys
    hidden = distance < 0 if mask.causal else torch.zeros_like(distance, dtype=torch.bool)
    if mask.window:
        hidden |= distance.abs() >= mask.window
    if mask.chunk:
        hidden |= (queries // mask.chunk) != (keys // mask.chunk)
    return hidden


def not_selected(indices: Tensor, context: int) -> Tensor:
    """Which of `context` keys are not among the `indices` (Q, n) of a token; -1 is none."""
    places = torch.where(indices < 0, context, indices).long()
    hidden = indices.new_ones((len(indices), context + 1), dtype=torch.bool)
    return hidden.scatter(1, places, False)[:, :context]
