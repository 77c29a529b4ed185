"""Layers of a `PackedModel` with the paged cache of the reference engine.

Attention keeps keys and values. Decode steps read what changes between them from the metadata's
tensors, so that a FULL graph can hold them; other steps run request by request. A layer that mixes
tokens in another way keeps its inputs, and runs over the whole context of a request in each step:
right for any such layer, and slow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...engine.kv_cache import LayerCache
from ...engine.metadata import AttentionMetadata
from .adapt import PackedModel
from .attention import (
    PackedRequests,
    Rule,
    attend_request,
    hidden_keys,
    not_selected,
    rows_of,
    weighted,
)
from .mixers import Mixer
from .routing import refusal

OWN_LAYER = "Give its op a layer of your own"


@dataclass(frozen=True, slots=True)
class PagedAttention(LayerCache):
    """Attention by `Rule` over the cached context of each request."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        rule: Rule,
        metadata: AttentionMetadata,
    ) -> None:
        if metadata.decode:
            output.copy_(self._decoded(query, key, value, rule, metadata))
            return
        slots = metadata.slot_mapping[: sum(metadata.query_lens)]
        _write(self.keys, key, slots)
        _write(self.values, value, slots)
        for place, rows in enumerate(rows_of(metadata.query_lens)):
            keys, values = (_read(x, metadata, place) for x in (self.keys, self.values))
            output[rows] = attend_request(query[rows], keys, values, rule.of_rows(rows))
        output[len(slots) :] = 0

    def _decoded(
        self, query: Tensor, key: Tensor, value: Tensor, rule: Rule, metadata: AttentionMetadata
    ) -> Tensor:
        """Each row over the longest possible context of its request, all rows at once."""
        _write(self.keys, key, metadata.slot_mapping)
        _write(self.values, value, metadata.slot_mapping)
        rows, stops = len(query), metadata.query_start_loc[1:]
        row = torch.arange(rows, device=query.device)
        owner = torch.searchsorted(stops, row, right=True)
        seen = metadata.seq_lens[owner] - stops[owner] + row + 1
        table = metadata.block_table[owner]
        keys, values = (cache[table].flatten(1, 2) for cache in (self.keys, self.values))
        places = torch.arange(keys.shape[1], device=query.device)
        beyond = places >= seen[:, None]
        hidden = hidden_keys(seen - 1, places, rule) | beyond
        if rule.indices is not None:
            hidden |= not_selected(rule.indices, len(places))
        values = values.masked_fill(beyond[..., None, None], 0)  # they may be infinite
        return weighted(query[:, None], keys, values, hidden[:, None, None], rule)[:, 0]


@dataclass(frozen=True, slots=True)
class PagedMixer(LayerCache):
    """A layer's own forward over the cached inputs of each request; `keys` has these inputs."""

    mixer: Mixer

    def __call__(
        self, inputs: Sequence[Tensor | None], output: Tensor, metadata: AttentionMetadata
    ) -> None:
        mixer = self.mixer
        if mixer.by_row:
            mixer(inputs, output, PackedRequests(metadata.query_lens))
            return
        slots = metadata.slot_mapping[: sum(metadata.query_lens)]
        _write(self.keys, mixer.rows(inputs)[:, None], slots)
        start = 0
        for place, length in enumerate(metadata.query_lens):
            context = _read(self.keys, metadata, place)[:, 0]
            result = mixer.over_rows(context, inputs)
            tail = result.narrow(mixer.dim, result.shape[mixer.dim] - length, length)
            output.narrow(mixer.dim, start, length).copy_(tail)
            start += length
        output.narrow(mixer.dim, start, output.shape[mixer.dim] - start).zero_()


def paged_layers(
    model: PackedModel, *, num_blocks: int, block_size: int, dtype: torch.dtype
) -> dict[str, LayerCache]:
    """What the ops of `model` find in the forward context, by layer name, with zeroed caches.

    A cache of inputs is float32, which holds positions too. Raises ModelNotAdaptable for a layer
    with an input that a cache of tokens cannot hold.
    """

    def cache(*row: int, dtype: torch.dtype = dtype) -> Tensor:
        device = next(model.parameters()).device
        return torch.zeros((num_blocks, block_size, *row), dtype=dtype, device=device)

    layers: dict[str, LayerCache] = {}
    for name in model.biased:
        raise refusal(model.model, f"{name} adds a bias for each pair of tokens", OWN_LAYER)
    for name, (heads, key_dim, value_dim) in model.kv_shapes.items():
        layers[name] = PagedAttention(cache(heads, key_dim), cache(heads, value_dim))
    for name, mixer in model.layers.items():
        width = 0 if mixer.by_row else mixer.width or 0
        if not (width or mixer.by_row):
            reason = f"{name} takes values for pairs of tokens, such as a mask, or for none"
            raise refusal(model.model, reason, OWN_LAYER)
        layers[name] = PagedMixer(cache(1, width, dtype=torch.float32), cache(1, 0), mixer)
    return layers


def _write(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The first rows into these slots."""
    cache.flatten(0, 1).index_copy_(0, slots, rows[: len(slots)].to(cache.dtype))


def _read(cache: Tensor, metadata: AttentionMetadata, place: int) -> Tensor:
    """The context of one request."""
    context_len = metadata.context_lens[place]
    table = metadata.block_table[place, : -(-context_len // cache.shape[1])]
    return cache[table].flatten(0, 1)[:context_len]
