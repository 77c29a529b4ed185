"""Defragmentation moves blocks without changing what any request finds in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.kv_cache import (
    SWAP_SIZES,
    Defragmenter,
    allocate_layer_caches,
    swap_pairs,
)


def make(num_blocks: int, threshold: int) -> tuple[BlockManager, Any, Defragmenter]:
    layers = allocate_layer_caches(
        ["a", "b"], num_blocks=num_blocks, block_size=2, num_kv_heads=1, head_dim=2,
        dtype=torch.float32, device=torch.device("cpu"),
    )  # fmt: skip
    for layer in layers.values():
        layer.keys.copy_(torch.rand_like(layer.keys))
        layer.values.copy_(torch.rand_like(layer.values))
    blocks = BlockManager(num_blocks, 2)
    return blocks, layers, Defragmenter(blocks, layers, threshold=threshold)


def contents(blocks: BlockManager, layers: Any, requests: set[int]) -> dict[int, list[Any]]:
    return {
        request: [
            part[blocks.table(request)].tolist()
            for layer in layers.values()
            for part in (layer.keys, layer.values)
        ]
        for request in requests
    }


@given(
    st.integers(4, 60),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 20)), max_size=25),
    st.integers(0, 8),
)
def test_requests_find_their_contents_and_blocks_are_together(
    num_blocks: int, actions: Any, threshold: int
) -> None:
    blocks, layers, defragmenter = make(num_blocks, threshold)
    for grow, request, num_tokens in actions:
        blocks.grow(request, num_tokens) if grow else blocks.free(request)
    requests = set(range(6))
    before, dump = contents(blocks, layers, requests), layers["a"].keys[0].clone()
    moved = defragmenter.run()
    assert contents(blocks, layers, requests) == before
    assert torch.equal(layers["a"].keys[0], dump)
    used = blocks.used
    assert sorted(used + blocks.free_blocks) == list(range(1, num_blocks))
    assert max(used, default=0) - threshold <= len(used)
    if moved:
        assert sorted(used) == list(range(1, len(used) + 1))
        assert defragmenter.run() == 0


def test_the_threshold_decides() -> None:
    blocks, _, defragmenter = make(60, threshold=32)
    for request in range(40):
        blocks.grow(request, 2)
    for request in range(7, 39):
        blocks.free(request)
    assert defragmenter.run() == 0  # 40 - 32 is the number of used blocks
    blocks.free(0)
    assert defragmenter.run() == 1


def test_pairs_stop_where_nothing_is_gained() -> None:
    assert swap_pairs([9, 3, 8], [1, 2, 4, 7]) == [(9, 1), (8, 2)]
    assert len(swap_pairs(range(1000, 2000), range(1000))) == 512


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (1, ()),
        (2, ()),
        (3, (8,)),
        (18, (8,)),
        (19, (8, 16)),
        (514, SWAP_SIZES[:-1]),
        (515, SWAP_SIZES),
    ],
)
def test_warm_up_covers_every_size_that_occurs_and_changes_nothing(
    num_blocks: int, sizes: tuple[int, ...]
) -> None:
    _, layers, defragmenter = make(num_blocks, 0)
    before = {name: layer.clone() for name, layer in layers.items()}
    task = defragmenter.warmup()
    assert task.shapes == sizes
    for size in task.shapes:
        task.run(size)
    for name, layer in layers.items():
        assert torch.equal(layer.keys, before[name].keys)
        assert torch.equal(layer.values, before[name].values)
