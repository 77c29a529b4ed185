"""Paged attention as Triton kernels: prompts, their chunks and decodes in one launch.

`piecegraph_reference::unified_attention` reads lengths and block tables from tensors on the device,
so one FULL graph serves every mix of requests that its descriptor covers. On a CPU the kernels run
in Triton's interpreter, if `TRITON_INTERPRET=1` is set before the process starts.

A tile is some query tokens of one request with all query heads of one key head. Request `r` begins
at tile `query_start_loc[r] // tokens_of_a_tile + r`: so the grid depends on the descriptor alone,
and a request's result does not depend on the other requests.
"""

# Triton gives a kernel's arguments their types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import triton
import triton.language as tl

LIBRARY: Any = torch.library.Library("piecegraph_reference", "FRAGMENT")
LIBRARY.define(
    "unified_attention(Tensor query, Tensor key, Tensor value, Tensor(a!) output, Tensor(b!) keys,"
    " Tensor(c!) values, Tensor slot_mapping, Tensor block_table, Tensor seq_lens,"
    " Tensor query_start_loc, int window) -> ()"
)

ROWS = 16
"""Rows of a tile, which `tl.dot` needs; as many as a power of two needs for more heads."""
PLACES = 32
"""Cached tokens that a tile reads at a time."""


def unified_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    window: int,
) -> None:
    """Write each token's key and value to its slot, then attend over the cached context.

    A slot of -1 is not written. Rows of a request of length 0 become zeros; `window` 0 is none.
    """
    tokens, heads, dim = query.shape
    block_size, kv_heads = keys.shape[1:3]
    group = heads // kv_heads
    rows = max(ROWS, triton.next_power_of_2(group))
    tile = rows // group
    width = triton.next_power_of_2(dim)
    requests = len(seq_lens)

    def launch() -> None:
        with torch.cuda.device_of(query):
            _write[(tokens, kv_heads)](
                key, value, keys, values, slot_mapping,
                key.stride(), value.stride(), keys.stride(), values.stride(),
                block_size, dim, width,
            )  # fmt: skip
            _attend[(tokens // tile + requests, kv_heads)](
                query, keys, values, output, block_table, seq_lens, query_start_loc,
                query.stride(), keys.stride(), values.stride(), output.stride(),
                block_table.stride(0), requests, dim**-0.5, window,
                block_size, dim, max(16, width), group, tile, rows, PLACES,
            )  # fmt: skip

    if query.is_cuda:
        launch()
    else:  # a capture in this thread would record the interpreter's own copies
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch).result()


LIBRARY.impl("unified_attention", unified_attention, "CPU")
LIBRARY.impl("unified_attention", unified_attention, "CUDA")


@triton.jit
def _write(
    key, value, keys, values, slot_mapping,
    key_stride, value_stride, keys_stride, values_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One token and key head."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        at = tl.arange(0, WIDTH)
        block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        row = tl.load(
            key + token * key_stride[0] + head * key_stride[1] + at * key_stride[2],
            mask=at < DIM,
        )
        start = block * keys_stride[0] + place * keys_stride[1] + head * keys_stride[2]
        tl.store(keys + start + at * keys_stride[3], row, mask=at < DIM)
        row = tl.load(
            value + token * value_stride[0] + head * value_stride[1] + at * value_stride[2],
            mask=at < DIM,
        )
        start = block * values_stride[0] + place * values_stride[1] + head * values_stride[2]
        tl.store(values + start + at * values_stride[3], row, mask=at < DIM)


@triton.jit
def _attend(
    query, keys, values, output, block_table, seq_lens, query_start_loc,
    query_stride, keys_stride, values_stride, output_stride, table_stride,
    num_requests, scale, window,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One tile and key head: softmax over the visible context, a part of it at a time.

    Operands of `tl.dot` are float32: in other types Triton's interpreter computes something else.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    low, high = 0, num_requests
    while low < high:  # the last request that begins at this tile or before
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TILE + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - start
    first = (tile - start // TILE - request) * TILE
    if first < query_len:
        row = tl.arange(0, ROWS)
        at = tl.arange(0, WIDTH)
        token = first + row // GROUP
        real = (row < TILE * GROUP) & (token < query_len)
        head = kv_head * GROUP + row % GROUP
        both = real[:, None] & (at < DIM)[None, :]
        start_of_row = (start + token) * query_stride[0] + head * query_stride[1]
        q = tl.load(query + start_of_row[:, None] + at[None, :] * query_stride[2], both, other=0.0)
        q = q.to(tl.float32) * scale

        seq_len = tl.load(seq_lens + request)
        position = seq_len - query_len + token
        begin = seq_len - query_len + first - window + 1
        begin = tl.where(window > 0, tl.maximum(begin, 0), 0) // PLACES * PLACES
        end = tl.minimum(seq_len, seq_len - query_len + first + TILE)
        highest = tl.full([ROWS], -1.0e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, WIDTH], tl.float32)
        while begin < end:
            place = begin + tl.arange(0, PLACES)
            known = place < end
            table = block_table + request * table_stride + place // BLOCK_SIZE
            block = tl.load(table, known, other=0)
            inside = known[:, None] & (at < DIM)[None, :]
            start_of_place = block * keys_stride[0] + place % BLOCK_SIZE * keys_stride[1]
            start_of_place += kv_head * keys_stride[2]
            k = tl.load(
                keys + start_of_place[:, None] + at[None, :] * keys_stride[3], inside, other=0.0
            )
            scores = tl.dot(q, tl.trans(k.to(tl.float32)), input_precision="ieee")
            seen = known[None, :] & (place[None, :] <= position[:, None])
            seen &= (window == 0) | (place[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -1.0e30)
            higher = tl.maximum(highest, tl.max(scores, 1))
            weights = tl.where(seen, tl.exp(scores - higher[:, None]), 0.0)
            kept = tl.exp(highest - higher)
            start_of_place = block * values_stride[0] + place % BLOCK_SIZE * values_stride[1]
            start_of_place += kv_head * values_stride[2]
            v = tl.load(
                values + start_of_place[:, None] + at[None, :] * values_stride[3], inside, other=0.0
            )
            added = tl.dot(weights, v.to(tl.float32), input_precision="ieee")
            weighted = weighted * kept[:, None] + added
            total = total * kept + tl.sum(weights, 1)
            highest = higher
            begin += PLACES
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]
        start_of_row = (start + token) * output_stride[0] + head * output_stride[1]
        where = output + start_of_row[:, None] + at[None, :] * output_stride[2]
        tl.store(where, result.to(output.dtype.element_ty), both)
