"""Paged attention as Triton kernels: prompts, their chunks and decodes in one launch.

`piecegraph_reference::unified_attention` reads lengths and block tables from tensors on the device,
so one FULL graph serves every mix of requests that its descriptor covers. On a CPU the kernels run
in Triton's interpreter, if `TRITON_INTERPRET=1` is set before the process starts.

A tile is some query tokens of one request with all query heads of one key head. Request `r` begins
at tile `query_start_loc[r] // tokens_of_a_tile + r`: so the grid depends on the descriptor alone.
Where tiles are too few for a device, several blocks share the context of each, and a second kernel
joins what they found. A request's result depends on the number of them, not on other requests.
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

DECODE_ROWS, PROMPT_ROWS = 16, 64
"""Rows of a tile, token by token with the query heads of a key head; `tl.dot` needs 16. Those of
prompts are for batches with enough tokens to fill them."""
PLACES = 32
"""Cached tokens that a tile reads at a time."""
MOST_PARTS, SMALLEST_PART = 32, 256
"""Into how many parts a context is divided, and the fewest tokens of one."""
WIDENED = tl.constexpr(triton.knobs.runtime.interpret)
"""The interpreter's `tl.dot` computes something else than a GPU's, except in float32."""


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
    group, requests = heads // kv_heads, len(seq_lens)
    rows = tile_rows(tokens, requests, group, query.dtype)
    tile = rows // group
    width = triton.next_power_of_2(dim)
    tiles = tokens // tile + requests
    parts = parts_of(min(tiles, tokens) * kv_heads, block_table.shape[1] * block_size, query.device)
    form = (tokens, heads, parts) if parts > 1 else (0,)
    sums = query.new_empty((*form, dim), dtype=torch.float32)
    scales = query.new_empty(form, dtype=torch.float32)

    def launch() -> None:
        with torch.cuda.device_of(query):
            _write[(tokens, kv_heads)](
                key, value, keys, values, slot_mapping,
                key.stride(), value.stride(), keys.stride(), values.stride(),
                block_size, dim, width,
            )  # fmt: skip
            _attend[(tiles, kv_heads, parts)](
                query, keys, values, output, sums, scales, block_table, seq_lens, query_start_loc,
                query.stride(), keys.stride(), values.stride(), output.stride(),
                block_table.stride(0), requests, dim**-0.5, window,
                block_size, dim, max(16, width), group, tile, rows, PLACES,
            )  # fmt: skip
            if parts > 1:
                _join[(tokens, heads)](
                    output, sums, scales, output.stride(), parts, dim, width, MOST_PARTS
                )

    if query.is_cuda:
        launch()
    else:  # a capture in this thread would record the interpreter's own copies
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launch).result()


def tile_rows(tokens: int, requests: int, group: int, dtype: torch.dtype) -> int:
    """Rows of a tile: as many as a power of two needs for all heads of a group, or more. In
    float32, which tensor cores do not take, those of prompts would not fit into registers."""
    prompts = tokens * group >= PROMPT_ROWS * requests and dtype.itemsize < 4
    rows = PROMPT_ROWS if prompts else DECODE_ROWS
    return int(max(rows, triton.next_power_of_2(group)))


def parts_of(blocks: int, context: int, device: torch.device) -> int:
    """Into how many parts contexts of up to `context` tokens are divided: so that `blocks`, as many
    as have work with one part each, become about two for each multiprocessor of the device."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count // max(blocks, 1)
    return max(1, min(wanted, context // SMALLEST_PART, MOST_PARTS))


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


@triton.jit(do_not_specialize=["num_requests"])
def _attend(
    query, keys, values, output, sums, scales, block_table, seq_lens, query_start_loc,
    query_stride, keys_stride, values_stride, output_stride, table_stride,
    num_requests, scale, window,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """One tile, key head and part of the context: softmax over what is visible of it.

    With one part, the result goes to `output`; else that of each part to `sums`, and the logarithm
    of what its weights add up to, to `scales`.
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
        if WIDENED:
            q = q.to(tl.float32)

        seq_len = tl.load(seq_lens + request)
        position = seq_len - query_len + token
        begin = seq_len - query_len + first - window + 1
        begin = tl.where(window > 0, tl.maximum(begin, 0), 0) // PLACES * PLACES
        end = tl.minimum(seq_len, seq_len - query_len + first + TILE)
        part, parts = tl.program_id(2), tl.num_programs(2)
        size = tl.cdiv(tl.cdiv(end - begin, PLACES), parts) * PLACES
        begin += part * size
        end = tl.minimum(end, begin + size)
        highest = tl.full([ROWS], -1.0e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        weighted = tl.zeros([ROWS, WIDTH], tl.float32)
        for chunk in tl.range(begin, end, PLACES):
            place = chunk + tl.arange(0, PLACES)
            known = place < end
            table = block_table + request * table_stride + place // BLOCK_SIZE
            block = tl.load(table, known, other=0)
            inside = known[:, None] & (at < DIM)[None, :]
            start_of_place = block * keys_stride[0] + place % BLOCK_SIZE * keys_stride[1]
            start_of_place += kv_head * keys_stride[2]
            k = tl.load(
                keys + start_of_place[:, None] + at[None, :] * keys_stride[3], inside, other=0.0
            )
            if WIDENED:
                k = k.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
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
            if WIDENED:
                v = v.to(tl.float32)
            added = tl.dot(weights.to(v.dtype), v, input_precision="tf32x3")
            weighted = weighted * kept[:, None] + added
            total = total * kept + tl.sum(weights, 1)
            highest = higher
        some = tl.where(total > 0, total, 1.0)
        result = weighted / some[:, None]
        if parts == 1:
            start_of_row = (start + token) * output_stride[0] + head * output_stride[1]
            where = output + start_of_row[:, None] + at[None, :] * output_stride[2]
            tl.store(where, result.to(output.dtype.element_ty), both)
        else:
            place = ((start + token) * tl.num_programs(1) * GROUP + head) * parts + part
            tl.store(sums + place[:, None] * DIM + at[None, :], result, both)
            scale_of_part = tl.where(total > 0, highest + tl.log(some), -1.0e30)
            tl.store(scales + place, scale_of_part, real)


@triton.jit(do_not_specialize=["parts"])
def _join(
    output, sums, scales, output_stride, parts,
    DIM: tl.constexpr, WIDTH: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """One token and query head: the results of all parts, weighed."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = (token * tl.num_programs(1) + head) * parts
    part, at = tl.arange(0, MOST), tl.arange(0, WIDTH)
    scale = tl.load(scales + row + part, part < parts, other=-1.0e30)
    weights = tl.where(part < parts, tl.exp(scale - tl.max(scale, 0)), 0.0)
    both = (part < parts)[:, None] & (at < DIM)[None, :]
    found = tl.load(sums + (row + part)[:, None] * DIM + at[None, :], both, other=0.0)
    result = tl.sum(found * weights[:, None], 0) / tl.sum(weights, 0)
    where = output + token * output_stride[0] + head * output_stride[1] + at * output_stride[2]
    tl.store(where, result.to(output.dtype.element_ty), at < DIM)
