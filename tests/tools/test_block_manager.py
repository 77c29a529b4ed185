"""The block manager never allocates a block twice or the dump block, and loses none."""

from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.engine.block_manager import DUMP_BLOCK, BlockManager

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["grow", "free"]), st.integers(0, 3), st.integers(0, 40)),
    max_size=60,
)


@given(ACTIONS, st.integers(2, 12), st.integers(1, 5))
def test_every_block_has_at_most_one_owner(actions, num_blocks, block_size):
    blocks = BlockManager(num_blocks, block_size)
    for action, request_id, num_tokens in actions:
        if action == "free":
            blocks.free(request_id)
        else:
            before = list(blocks.table(request_id))
            grown = blocks.grow(request_id, num_tokens)
            table = blocks.table(request_id)
            assert table[: len(before)] == before
            assert grown == (len(table) * block_size >= num_tokens)
            assert grown or table == before
        owned = [block for owner in range(4) for block in blocks.table(owner)]
        assert len(owned) == len(set(owned)) == num_blocks - 1 - len(blocks.free_blocks)
        assert DUMP_BLOCK not in owned


@given(st.integers(1, 6), st.integers(1, 30))
def test_slots_are_distinct_and_in_the_requests_blocks(block_size, num_tokens):
    blocks = BlockManager(40, block_size)
    blocks.grow(0, 3)
    assert blocks.grow(1, num_tokens)
    slots = blocks.slots(1, 0, num_tokens)
    assert len(set(slots)) == num_tokens
    expected = [blocks.table(1)[position // block_size] for position in range(num_tokens)]
    assert [slot // block_size for slot in slots] == expected
    assert blocks.slots(1, num_tokens - 1, num_tokens) == slots[-1:]


def test_growing_is_all_or_nothing():
    blocks = BlockManager(4, 2)
    assert not blocks.grow(0, 7)
    assert len(blocks.free_blocks) == 3
    assert blocks.grow(0, 6)
    assert not blocks.grow(1, 1)
