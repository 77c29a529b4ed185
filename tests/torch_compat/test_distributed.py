"""The store of a process group, and collectives of one rank alone."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from piecegraph.torch_compat.basics.distributed import (
    process_group_store,
    run_alone,
    without_other_ranks,
)
from tests.seen_collectives import Collectives


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", timedelta(seconds=20), 1, 0)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("named", [False, True])
def test_process_group_store_is_the_one_of_all_ranks(group, named):
    store = process_group_store(dist.new_group([0]) if named else None)
    store.set("key", "value")
    assert process_group_store(dist.new_group([0]) if named else None).clone() is not store
    assert store.get("key") == b"value"


X = torch.arange(8.0).view(4, 2)
FUNCTIONAL = torch.ops._c10d_functional
TWICE = torch.cat([X, X])


@pytest.mark.parametrize(
    ("op", "args", "result"),
    [
        (FUNCTIONAL.all_reduce, (X, "sum", "0"), X),
        (FUNCTIONAL.all_reduce_, (X, "sum", "0"), X),
        (FUNCTIONAL.all_gather_into_tensor, (X, 2, "0"), TWICE),
        (FUNCTIONAL.reduce_scatter_tensor, (X, "sum", 2, "0"), X[:2]),
        (FUNCTIONAL.all_to_all_single, (X, [1, 2], [3, 1], "0"), X[:3]),
        (FUNCTIONAL.broadcast, (X, 1, "0"), X),
        (FUNCTIONAL.all_reduce_coalesced, ([X, TWICE], "sum", "0"), [X, TWICE]),
    ],
    ids=str,
)
def test_run_alone_gives_each_form_its_own_rows(op, args, result):
    torch.testing.assert_close(run_alone(op.default, args, {}), result)


def test_without_other_ranks_nobody_is_waited_for(group):
    with Collectives() as collectives, without_other_ranks():
        x, gathered = X.clone(), torch.empty(8, 2)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(x, 0)
        torch.ops.c10d._allgather_base_(gathered, x, dist.group.WORLD.boxed())
        dist.barrier()
        reduced = functional.all_reduce(x, "sum", dist.group.WORLD) + 0
    assert not collectives.seen
    for each in (x, gathered[:4], gathered[4:], reduced):
        torch.testing.assert_close(each, X)
