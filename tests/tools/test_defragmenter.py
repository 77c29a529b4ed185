"""Blocks move down between steps; every request finds in them what it found before."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.defragmenter import SIZES, Defragmenter
from piecegraph.tools.engine.kv_cache import LayerCache

from .conftest import ONE_LAYER, started


def make(num_blocks, threshold):
    """Two layers, of which the second shares its values with the first."""
    keys, values, other = torch.rand(3, num_blocks, 2, 1, 2).unbind()
    layers = {"a": LayerCache(keys, values), "b": LayerCache(other, values.view_as(values))}
    blocks = BlockManager(num_blocks, 2)
    return blocks, layers, Defragmenter(blocks, layers, threshold)


def contents(blocks, layers):
    tables = [blocks.table(request) for request in range(6)]
    parts = [part for layer in layers.values() for part in (layer.keys, layer.values)]
    return [part[table].tolist() for table in [[0], *tables] for part in parts]


@given(
    st.integers(4, 60),
    st.lists(st.tuples(st.booleans(), st.integers(0, 5), st.integers(1, 20)), max_size=25),
    st.integers(0, 8),
)
def test_requests_find_their_contents_and_blocks_are_together(num_blocks, actions, threshold):
    blocks, layers, defragmenter = make(num_blocks, threshold)
    for grow, request, num_tokens in actions:
        blocks.grow(request, num_tokens) if grow else blocks.free(request)
        owned = [block for request in range(6) for block in blocks.table(request)]
        before = contents(blocks, layers)
        assert blocks.gaps == max(owned, default=0) - len(owned)
        assert defragmenter.is_due == (blocks.gaps > threshold)
        if not defragmenter.is_due:
            continue
        defragmenter.run()
        assert contents(blocks, layers) == before
        owned = sorted(block for request in range(6) for block in blocks.table(request))
        assert owned == blocks.blocks_in_use == list(range(1, len(owned) + 1))
        assert blocks.free_blocks == list(range(len(owned) + 1, num_blocks))


def test_a_swap_has_at_most_512_pairs_and_the_rest_follows():
    blocks, layers, defragmenter = make(2001, 32)
    for request in range(2):
        blocks.grow(request, 2000)
    blocks.free(0)
    before = contents(blocks, layers)
    while defragmenter.is_due:
        defragmenter.run()
    assert defragmenter.swaps == [512, 488]
    assert contents(blocks, layers) == before
    assert blocks.gaps == 0


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 40])
def test_warm_up_swaps_in_every_size_and_undoes_it(num_blocks):
    _, layers, defragmenter = make(num_blocks, 0)
    parts = [part for layer in layers.values() for part in (layer.keys, layer.values)]
    before = [part.clone() for part in parts]
    task = defragmenter.warmup()
    assert list(task.shapes) == ([*SIZES, SIZES[0]] if num_blocks > 2 else [])
    for number, size in enumerate(task.shapes):
        task.run(size)
        for now, then in zip(parts, before, strict=True):
            moved = then.clone()
            moved[[1, 2]] = then[[2, 1]]
            assert torch.equal(now, then if number % 2 else moved)
    assert "two blocks" in task.cost or task.shapes


@pytest.mark.compile
@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"mode": "none"}, marks=pytest.mark.heavy),
        {"mode": "full-and-piecewise", "verify": "all"},
        {"mode": "full-decode-only", "strategy": "lazy", "kv_blocks": 80},  # it preempts
        {"speculate": 2, "max_num_tokens": 24},
        pytest.param(
            {"buckets": "linear", "strategy": "lazy", "capture_sizes": None, "max_num_tokens": 32},
            marks=pytest.mark.heavy,
        ),
    ],
    ids=str,
)
def test_tokens_and_graphs_are_those_without_it(options):
    served = {}
    options = {"requests": 12, "temperature": "0,1", "block_size": 2, **options}
    for threshold in (None, 0):
        with started(model=f"{ONE_LAYER},layers=2", defragment=threshold, **options) as engine:
            service = engine.service
            blocks, defragmenter = service.engine.scheduler.blocks, service.engine.defragmenter
            if defragmenter is not None:
                run = defragmenter.run

                def run_and_look(run=run, blocks=blocks):
                    run()
                    assert blocks.gaps == 0

                defragmenter.run = run_and_look
            tokens = engine.serve()
            steps = [(step.mode, step.padded_tokens) for step in service.engine.log.steps]
            captured = [record["graph_index"] for record in service.prepared.report()["captures"]]
            served[threshold] = tokens, steps, captured
            assert service.verification.ok
            if defragmenter is not None:
                assert len(defragmenter.swaps) > 3
    assert served[0] == served[None]
