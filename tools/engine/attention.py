"""The reference attention op: writes into the paged KV cache and attends over it.

`piecegraph_reference::paged_attention(query, key, value, output, layer_name)` finds its layer's
cache and the step's metadata in the forward context, so that its arguments, and with them the
graph, are the same for every batch. It is registered through `torch.library.Library`, which costs
a tenth of `custom_op` per call.

In plain code, decode steps and all other steps differ. The code for decode steps reads only
tensors in persistent buffers, with shapes that depend only on the descriptor: it can be captured in
a FULL graph. The other code loops over the requests on the host and runs between graphs. The Triton
kernel of `triton_attention` computes both, and both can be captured.
"""

from __future__ import annotations

from typing import Any

import torch

from ... import get_forward_context
from ...errors import MissingMetadata
from .kv_cache import LayerCache
from .metadata import AttentionMetadata, BucketMetadata

SPLITTING_OP = "piecegraph_reference::paged_attention"

LIBRARY: Any = torch.library.Library("piecegraph_reference", "DEF")  # type: ignore[no-untyped-call]
LIBRARY.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, str layer_name)"
    " -> ()"
)


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    layer_name: str,
) -> None:
    """Causal grouped-query attention of each request over its cached context.

    `query` and `output`: (T, num_heads, head_dim); `key` and `value`: (T, num_kv_heads, head_dim).
    Rows of padding are written too, with zeros. Raises MissingMetadata outside a step.
    """
    context = get_forward_context()
    cache: LayerCache = context.layers[layer_name]
    metadata: AttentionMetadata | BucketMetadata | None = context.metadata
    if metadata is None:
        raise MissingMetadata(layer_name=layer_name)
    if isinstance(metadata, BucketMetadata):
        metadata.attend(query, key, value, output, cache)
    elif metadata.triton:
        from .triton_attention import unified_attention as _registers_the_op  # noqa: F401

        torch.ops.piecegraph_reference.unified_attention(
            query, key, value, output, cache.keys, cache.values, *metadata.tensors, cache.window
        )
    elif metadata.decode:
        _decode(query, key, value, output, cache, metadata)
    else:
        _mixed(query, key, value, output, cache, metadata)


LIBRARY.impl("paged_attention", paged_attention, "CPU")
LIBRARY.impl("paged_attention", paged_attention, "CUDA")
torch.library.register_fake(SPLITTING_OP, lambda *args: None, lib=LIBRARY)


def _decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
) -> None:
    """Each row over the longest possible context of its request, all rows at once.

    The same shapes for every batch of a descriptor, and contiguous batches for `bmm`, make a
    row's result bitwise independent of the other rows. Values beyond a row's length are
    replaced, not multiplied by zero: they may be NaN or infinite.
    """
    _write(key, value, cache, metadata.slot_mapping)
    rows, num_heads, head_dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    row, stops = torch.arange(rows, device=query.device), metadata.query_start_loc[1:]
    owner = torch.searchsorted(stops, row, right=True)
    seen = (metadata.seq_lens[owner] - stops[owner] + row + 1)[:, None]
    keys, values = (
        paged[metadata.block_table[owner]].flatten(1, 2).transpose(1, 2).contiguous()
        for paged in (cache.keys, cache.values)
    )
    places = torch.arange(keys.shape[2], device=query.device)
    beyond = places >= seen
    if cache.window:
        beyond |= places < seen - cache.window
    beyond = beyond[:, None, :, None]
    values.masked_fill_(beyond, 0)
    grouped = query.reshape(rows * num_kv_heads, group, head_dim)
    scores = torch.bmm(grouped, keys.flatten(0, 1).transpose(1, 2)) * head_dim**-0.5
    scores = scores.view(rows, num_kv_heads, group, -1)
    weights = _softmax(scores, beyond.transpose(2, 3)).flatten(0, 1)
    output.copy_(torch.bmm(weights, values.flatten(0, 1)).view(rows, num_heads, head_dim))


def _mixed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
) -> None:
    """Request by request, each over its own context; padding rows do not touch the cache."""
    num_tokens = sum(metadata.query_lens)
    _write(key[:num_tokens], value[:num_tokens], cache, metadata.slot_mapping[:num_tokens])
    block_size = cache.keys.shape[1]
    start = 0
    for row, (query_len, context_len) in enumerate(
        zip(metadata.query_lens, metadata.context_lens, strict=True)
    ):
        blocks = metadata.block_table[row, : -(-context_len // block_size)]
        keys = cache.keys[blocks].flatten(0, 1)[:context_len].transpose(0, 1)
        values = cache.values[blocks].flatten(0, 1)[:context_len].transpose(0, 1)
        stop = start + query_len
        output[start:stop] = _attend_causally(query[start:stop], keys, values, cache.window)
        start = stop
    output[num_tokens:] = 0


def _attend_causally(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int
) -> torch.Tensor:
    """The last queries of a context: `query` (Q, heads, dim); `keys`, `values` (kv_heads, C, dim).

    Returns (Q, heads, dim).
    """
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, context_len, _ = keys.shape
    group = num_heads // num_kv_heads
    grouped = query.reshape(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.transpose(1, 2)[:, None] * head_dim**-0.5
    pairs = torch.ones(query_len, context_len, dtype=torch.bool, device=query.device)
    hidden = pairs.triu(context_len - query_len + 1)
    if window:
        hidden |= pairs.tril(context_len - query_len - window)
    weights = _softmax(scores, hidden)
    return (weights @ values[:, None]).permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)


def _softmax(scores: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """Softmax in float32 over the unmasked scores; finite also for a fully masked row."""
    lowest = torch.finfo(torch.float32).min
    return scores.float().masked_fill(hidden, lowest).softmax(-1).to(scores.dtype)


def _write(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    cache.keys.flatten(0, 1).index_copy_(0, slot_mapping, key)
    cache.values.flatten(0, 1).index_copy_(0, slot_mapping, value)
