"""Compares what must be equal on all ranks, with a timeout, and names the rank that differs.

Ranks that capture or dispatch differently run different collectives inside their steps and hang
without a message. No step pays for this: ranks exchange facts once at the start and once for each
capture.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ...dispatch import DispatchPlan
from ...errors import RankLost, RanksDisagree
from ..config import Config

Facts = Mapping[str, Any]


def single_rank(topic: str, facts: Facts) -> list[dict[str, Any]]:
    """`Ranks.exchange` for a single process."""
    return [dict(facts)]


def start_facts(config: Config, plan: DispatchPlan) -> dict[str, Any]:
    """What ranks compare before they capture: everything that decides a dispatch or a capture.

    Settings come before the graphs that follow from them, one fact each, so that the first
    difference is the cause or the first graph that differs.
    """
    stated = plan.as_json()
    entries = stated.pop("entries")
    return {
        "attention capabilities": {name: s.name for name, s in config.supports().items()},
        **stated,
        **{f"graph {index}": entry for index, entry in enumerate(entries)},
        "strategy": config.strategy.value,
        "min_hits": config.min_hits,
        "captures_per_step": config.captures_per_step,
        "capture_ms_per_step": config.capture_ms_per_step,
        "memory_limit": config.memory_limit,
        "lazy_bytes": config.lazy_bytes,
    }


class Ranks:
    """The ranks of `group`, a gloo group of `torch.distributed`, seen from this process.

    After a rank was lost or disagreed the group is unusable: every later call raises.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group
        self._timeout = timedelta(seconds=timeout_s)
        self._seconds = timeout_s
        self._count = 0
        self._broken = False

    def exchange(self, topic: str, facts: Facts) -> list[dict[str, Any]]:
        """The `facts` (JSON) of every rank, by rank.

        Raises RankLost with the rank that did not answer, and RanksDisagree if ranks are at
        different topics or exchanges.
        """
        if self._broken:
            self._lost(self.rank, topic, "an earlier exchange failed")
        self._count += 1
        payload = json.dumps({"topic": [topic, self._count], "facts": facts}).encode()
        lengths = self._swap(torch.tensor([len(payload)]), lambda peer: 1, torch.int64, topic)
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        texts = self._swap(mine, lambda peer: int(lengths[peer]), torch.uint8, topic)
        answers = [json.loads(bytes(text.tolist())) for text in texts]
        self._must_be_equal(topic, [{"exchange": answer["topic"]} for answer in answers])
        return [answer["facts"] for answer in answers]

    def agree(self, topic: str, facts: Facts) -> None:
        """Raise RanksDisagree, with the ranks that differ, unless all state the same facts."""
        self._must_be_equal(topic, self.exchange(topic, facts))

    def _swap(
        self, mine: torch.Tensor, length: Callable[[int], int], dtype: torch.dtype, topic: str
    ) -> list[torch.Tensor]:
        """Send `mine` to every peer and receive theirs, in pairs: a lost peer can be named."""
        peers = [peer for peer in range(self.size) if peer != self.rank]
        theirs = {peer: torch.empty(length(peer), dtype=dtype) for peer in peers}
        waiting = []
        for peer in peers:
            try:
                waiting.append((peer, dist.isend(mine, group=self._group, group_dst=peer)))
                waiting.append((peer, dist.irecv(theirs[peer], group=self._group, group_src=peer)))
            except RuntimeError as error:
                self._lost(peer, topic, str(error))
        for peer, work in waiting:
            try:
                assert work is not None
                work.wait(self._timeout)
            except RuntimeError as error:
                self._lost(peer, topic, str(error))
        return [mine if rank == self.rank else theirs[rank] for rank in range(self.size)]

    def _must_be_equal(self, topic: str, stated: list[dict[str, Any]]) -> None:
        """Name the ranks that differ from what most state (rank 0 breaks a tie), and the fact."""
        for name in dict.fromkeys(name for each in stated for name in each):
            texts = [json.dumps(each.get(name), sort_keys=True) for each in stated]
            usual = Counter(texts).most_common(1)[0][0]
            odd = [rank for rank, text in enumerate(texts) if text != usual]
            if odd:
                self._broken = True
                raise RanksDisagree(
                    ranks=", ".join(map(str, odd)), topic=topic, fact=name,
                    stated="; ".join(f"rank {rank}: {texts[rank]}" for rank in odd), usual=usual,
                )  # fmt: skip

    def _lost(self, peer: int, topic: str, reason: str) -> NoReturn:
        self._broken = True
        summary = reason.splitlines()[0] if reason else "no answer"
        raise RankLost(rank=peer, topic=topic, seconds=self._seconds, reason=summary[:200])
