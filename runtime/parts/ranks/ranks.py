"""Compares what must be equal on all ranks, with a timeout, and names the rank that differs.

Ranks that capture or dispatch differently run different collectives inside their steps and hang
without a message. No step pays for this: ranks exchange facts once at the start and once for each
capture.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from ....config import Config, attention_support
from ....dispatch import DispatchPlan
from ....errors import RankLost, RanksDisagree
from ....torch_compat.basics.distributed import process_group_store
from ...core.exchange import Facts


def start_facts(config: Config, plan: DispatchPlan) -> dict[str, Any]:
    """What ranks compare before they capture, beside what their parts state: all that decides a
    dispatch.

    Settings come before the graphs that follow from them, one fact each, so that the first
    difference is the cause or the first graph that differs.
    """
    stated = plan.as_json()
    entries = stated.pop("entries")
    return {
        "attention capabilities": {name: s.name for name, s in attention_support(config).items()},
        **stated,
        **{f"graph {index}": entry for index, entry in enumerate(entries)},
    }


class Ranks:
    """The ranks of `group`, a process group of `torch.distributed`, seen from this process.

    Facts go through the store of the group and not over its connections: gloo closes all
    connections of a process as soon as one times out, and healthy ranks then look lost to others.
    All ranks must create their `Ranks` of one group in the same order. After a rank was lost or
    disagreed, every later call raises the same error.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, timeout_s: float = 60.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._store = process_group_store(group)
        created = self._store.add(f"piecegraph/created/{self.rank}", 1)
        self._prefix = f"piecegraph/{created}"
        self._timeout = timedelta(seconds=timeout_s)
        self._count = 0
        self._failure: RankLost | RanksDisagree | None = None
        self._store.set(self._key("process", self.rank), json.dumps([_machine(), os.getpid()]))

    def exchange(self, topic: str, facts: Facts) -> list[dict[str, Any]]:
        """The `facts` (JSON) of every rank, by rank.

        Raises RankLost, on all ranks with the same ranks, if some did not state theirs in time,
        and RanksDisagree if ranks are at different topics or exchanges.
        """
        if self._failure is not None:
            raise self._failure
        self._count += 1
        stated = json.dumps({"topic": [topic, self._count], "facts": facts})
        try:
            self._store.set(self._key(self._count, self.rank), stated)
            keys = [self._key(self._count, rank) for rank in range(self.size)]
            lost = self._lost_ranks(keys)
            answers = [] if lost else [json.loads(each) for each in self._store.multi_get(keys)]
            if self._count > 1:  # all ranks have read it: they are at this exchange
                self._store.delete_key(self._key(self._count - 1, self.rank))
        except RuntimeError as error:
            reason = f"the store of the process group cannot be reached: {error}".splitlines()[0]
            self._fail(self._rank_lost([0], topic, reason), informed=[])
        if lost:
            informed = [rank for rank in range(self.size) if rank not in lost]
            reason = "; ".join(f"rank {rank} {why}" for rank, why in lost.items())
            self._fail(self._rank_lost(list(lost), topic, reason), informed)
        self._must_be_equal(topic, [{"exchange": answer["topic"]} for answer in answers])
        return [answer["facts"] for answer in answers]

    def agree(self, topic: str, facts: Facts) -> None:
        """Raise RanksDisagree, with the ranks that differ, unless all state the same facts."""
        self._must_be_equal(topic, self.exchange(topic, facts))

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (self._prefix, *parts)))

    def _lost_ranks(self, keys: list[str]) -> dict[int, str]:
        """The ranks that have not stated their facts in time, and what is known of each.

        What the first rank finds whose time is over is in the store, and holds for all ranks: one
        that comes too late, or stops because of this error, is not taken for the cause.
        """
        late: dict[int, str] = {}
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError:  # the time is over
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            late = {rank: self._whereabouts(rank) for rank in missing}
        if late:
            first = self._store.compare_set(self._key("lost"), "", json.dumps(late))
        elif self._store.check([self._key("lost")]):
            first = self._store.get(self._key("lost"))
        else:
            return {}
        return {int(rank): why for rank, why in json.loads(first).items()}

    def _whereabouts(self, rank: int) -> str:
        """Whether a rank that stated nothing is late or has ended, as far as this process sees."""
        if not self._store.check([key := self._key("process", rank)]):
            return "has not created its Ranks"
        machine, process = json.loads(self._store.get(key))
        if machine != _machine():
            return f"is process {process} on {machine[0]}, which cannot be seen from here"
        if _is_running(process):
            return f"is late: its process {process} is still running"
        return f"has ended: there is no process {process}"

    def _must_be_equal(self, topic: str, stated: list[dict[str, Any]]) -> None:
        """Name the ranks that differ from what most state (rank 0 breaks a tie), and the fact."""
        for name in dict.fromkeys(name for each in stated for name in each):
            texts = [json.dumps(each.get(name), sort_keys=True) for each in stated]
            usual = Counter(texts).most_common(1)[0][0]
            odd = [rank for rank, text in enumerate(texts) if text != usual]
            if odd:
                disagreement = RanksDisagree(
                    ranks=", ".join(map(str, odd)), topic=topic, fact=name,
                    stated="; ".join(f"rank {rank}: {texts[rank]}" for rank in odd), usual=usual,
                )  # fmt: skip
                self._fail(disagreement, informed=list(range(self.size)))

    def _rank_lost(self, lost: list[int], topic: str, reason: str) -> RankLost:
        ranks, seconds = ", ".join(map(str, lost)), self._timeout.total_seconds()
        return RankLost(ranks=ranks, topic=topic, seconds=seconds, reason=reason[:500])

    def _fail(self, failure: RankLost | RanksDisagree, informed: list[int]) -> NoReturn:
        """Raise `failure` once the `informed` ranks, which raise it too, have reached this point.

        The store ends with the process that hosts it, which may be this one.
        """
        self._failure = failure
        with suppress(RuntimeError):
            self._store.set(self._key("informed", self.rank), "")
            self._store.wait([self._key("informed", rank) for rank in informed], self._timeout)
        raise failure


def _machine() -> list[str]:
    """Two processes see each other if these are equal: the host and its table of processes."""
    table = "/proc/self/ns/pid"
    return [socket.gethostname(), os.readlink(table) if sys.platform == "linux" else ""]


def _is_running(process: int) -> bool:
    """Whether a process of this machine runs; one that ended and waits for its parent does not."""
    try:
        os.kill(process, 0)
        stat = Path(f"/proc/{process}/stat")
        return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"
    except PermissionError:
        return True
    except OSError:
        return False
