"""What the first rank finds whose time is over holds for all: without processes."""

import pytest
import torch.distributed as dist

from piecegraph.errors import RankLost
from piecegraph.runtime.parts.ranks import ranks as module


def test_failure_35_a_late_rank_is_not_taken_for_the_cause(monkeypatch):
    """Rank 0 comes after rank 1 has given up on 0 and 2; it must not name 2 alone."""
    store = dist.HashStore()
    monkeypatch.setattr(module, "process_group_store", lambda group: store)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    named = []
    for rank in (1, 0):
        monkeypatch.setattr(dist, "get_rank", lambda group, rank=rank: rank)
        with pytest.raises(RankLost) as caught:
            module.Ranks(timeout_s=0.01).exchange("start", {})
        named.append(caught.value.facts["ranks"])
    assert named == ["0, 2", "0, 2"]
