"""Paged attention against textbook attention, for every form of batch."""

from copy import deepcopy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph import BatchDescriptor, RuntimeMode
from piecegraph.errors import MissingMetadata

from . import attention_batches
from .attention_batches import attend, buffers_of

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 8, 4


def textbook(query, keys, values):
    """One query row over all the keys it may see, head by head."""
    rows = []
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = (keys[:, kv_head] @ query[head]) / DIM**0.5
        rows.append(scores.softmax(0) @ values[:, kv_head])
    return torch.stack(rows)


class Batch(attention_batches.Batch):
    def expected(self):
        keys = self.cache.keys.flatten(0, 1).clone()
        values = self.cache.values.flatten(0, 1).clone()
        query, key, value = self.inputs
        rows, token = [], 0
        for share in self.schedule.shares:
            slots = self.blocks.slots(share.request.id, 0, share.context_len)
            own = slice(token, token + share.query_len)
            keys[slots[share.start :]] = key[own]
            values[slots[share.start :]] = value[own]
            for position in range(share.start, share.context_len):
                seen = slots[: position + 1]
                rows.append(textbook(query[token], keys[seen], values[seen]))
                token += 1
        return torch.stack(rows), keys, values


CHUNKS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 7)), min_size=1, max_size=5)
CONTEXTS = st.lists(st.integers(0, 30), min_size=1, max_size=6)


def check(batch, padding):
    expected, keys, values = batch.expected()
    output = batch.run(padding, garbage=5.0)
    torch.testing.assert_close(output[: batch.total], expected, rtol=1e-5, atol=1e-5)
    assert (output[batch.total :] == 0).all()
    torch.testing.assert_close(batch.cache.keys.flatten(0, 1)[BLOCK:], keys[BLOCK:])
    torch.testing.assert_close(batch.cache.values.flatten(0, 1)[BLOCK:], values[BLOCK:])


@given(CHUNKS, st.integers(0, 5))
def test_prompt_chunks_with_any_context(shapes, padding):
    check(Batch(shapes, decode=False), padding)


@given(CONTEXTS, st.integers(0, 5))
def test_decodes_with_any_context(contexts, padding):
    check(Batch([(context, 1) for context in contexts], decode=True), padding)


@pytest.mark.parametrize("decode", [False, True])
def test_failure_25_padding_rows_change_no_real_row_by_a_bit(decode):
    shapes = [(9, 1), (3, 1), (17, 1)]
    outputs = [
        Batch(shapes, decode=decode).run(padding, garbage=garbage)
        for padding, garbage in [(0, 0.0), (1, 9.0), (5, -1e30), (13, 2.0)]
    ]
    for output in outputs[1:]:
        assert torch.equal(output[:3], outputs[0])


@pytest.mark.parametrize("decode", [False, True])
def test_failure_26_nan_in_padding_rows_stays_out_of_real_rows(decode):
    batch = Batch([(9, 1), (3, 1)], decode=decode)
    clean = Batch([(9, 1), (3, 1)], decode=decode).run()
    for _ in range(2):
        output = batch.run(padding=4, garbage=torch.nan)
        assert torch.equal(output[:2], clean)
        assert (output[2:] == 0).all()


def test_failure_27_a_padding_request_of_length_0_yields_zeros():
    metadata = buffers_of(8).padding(BatchDescriptor(4, 4, 1), RuntimeMode.FULL)
    batch = Batch([(5, 1)] * 4, decode=True)
    assert (attend(batch.inputs, batch.cache, metadata) == 0).all()


@pytest.mark.parametrize("decode", [False, True])
def test_failure_29_padding_writes_to_the_dump_block_only(decode):
    batch = Batch([(9, 1), (3, 1)], decode=decode)
    before = deepcopy(batch.cache)
    larger = Batch([(9, 1), (3, 1), (17, 1), (5, 1)], decode=decode)
    buffers = buffers_of(48)
    buffers.fill(larger.schedule, larger.blocks, BatchDescriptor(larger.total))  # an earlier step
    batch.run(padding=6, buffers=buffers)
    own = {
        batch.blocks.slots(share.request.id, share.start, share.context_len)[0]
        for share in batch.schedule.shares
    }
    changed = (before.keys != batch.cache.keys).flatten(0, 1).flatten(1).any(dim=1)
    assert set(changed.nonzero().flatten().tolist()) - set(range(BLOCK)) == own


def test_a_decode_rows_result_does_not_depend_on_the_others():
    alone = Batch([(9, 1)], decode=True)
    among = Batch([(9, 1), (30, 1), (2, 1)], decode=True)
    among.cache = deepcopy(alone.cache)
    for mine, theirs in zip(among.inputs, alone.inputs, strict=True):
        mine[0] = theirs[0]
    assert torch.equal(alone.run()[0], among.run()[0])


def test_the_op_without_metadata_names_its_layer():
    batch = Batch([(0, 1)], decode=True)
    with pytest.raises(MissingMetadata, match="layer here"):
        attend(batch.inputs, batch.cache, None)


def test_the_op_is_declared_as_one_that_writes_its_output():
    schema = torch.ops.piecegraph_reference.paged_attention.default._schema
    assert [a.name for a in schema.arguments if a.alias_info is not None] == ["output"]
    assert not schema.returns
