"""The store of a process group."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from piecegraph.torch_compat.basics.distributed import process_group_store


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
