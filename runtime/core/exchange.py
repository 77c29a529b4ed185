"""What ranks agree by: each states facts on a topic and is given those of all.

A single process has `single_rank`. Every exchange on one rank has its counterpart on all others, in
the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...errors import RanksDisagree

Facts = Mapping[str, Any]

Outcome = tuple[float, int, str]
"""Of a capture: milliseconds, bytes, and why it failed, if it did."""

Exchange = Callable[[str, Facts], list[dict[str, Any]]]
"""Sends facts (JSON) on a topic to all ranks and returns those of each rank, by rank."""


def by_rank(stated: list[dict[str, Any]], fact: str) -> list[str]:
    """A fact of each rank that states one."""
    return [f"rank {rank}: {facts[fact]}" for rank, facts in enumerate(stated) if facts[fact]]


def single_rank(topic: str, facts: Facts) -> list[dict[str, Any]]:
    """The exchange of a single process."""
    return [dict(facts)]


def told(exchange: Exchange, topic: str, find: Callable[[], Facts]) -> list[dict[str, Any]]:
    """The facts that `find` gives on each rank, by rank.

    What it raises on one rank is raised there once the others know: they raise RanksDisagree.
    """
    try:
        facts = find()
    except Exception as error:
        exchange(topic, {"reason": str(error)})
        raise
    stated = exchange(topic, {**facts, "reason": ""})
    if ranks := [rank for rank, one in enumerate(stated) if one["reason"]]:
        raise _stopped(topic, stated, ranks)
    return stated


def _stopped(topic: str, stated: list[dict[str, Any]], ranks: list[int]) -> RanksDisagree:
    """The error of the other ranks, where `ranks` state why they cannot go on."""
    return RanksDisagree(
        ranks=", ".join(map(str, ranks)), topic=topic, fact="whether it can go on",
        stated="; ".join(by_rank(stated, "reason")).rstrip("."), usual="no error",
    )  # fmt: skip


class CaptureAgreement:
    """Ranks agree on one capture: before whatever may wait for another rank, and on the outcome.

    All stop at the first of these exchanges at which one of them has failed, so that none waits
    inside a collective of the model for a rank that has left the capture.
    """

    def __init__(self, exchange: Exchange = single_rank, topic: str = "") -> None:
        self.alone = exchange is single_rank
        """Whether there is no other rank."""
        self._exchange = exchange
        self._topic = topic
        self._failed: Outcome | None = None
        self._ended: RanksDisagree | None = None
        """Of a rank whose failure ends the capture of all."""

    def before(self, what: str, stated: int = 0) -> int:
        """Before `what` runs on all ranks. Returns the largest `stated`. Raises OtherRankFailed."""
        if self.alone:
            return stated
        if self._failed is None:
            outcome = self._agreed(what, 0.0, stated, "")
            self._failed = outcome if outcome[2] else None
            stated = outcome[1]
        if self._failed is not None:  # also where the model has swallowed the error
            raise OtherRankFailed(self._failed[2])
        return stated

    def outcome(self, ms: float, num_bytes: int, reason: str) -> Outcome:
        """The outcome on all ranks: the longest time, the most bytes, any failure.

        Raises RanksDisagree where another rank has `raised`.
        """
        if self.alone:
            return ms, num_bytes, reason
        outcome = self._failed or self._agreed("its end", ms, num_bytes, reason)
        if self._ended is not None:
            raise self._ended
        return outcome

    def raised(self, reason: str) -> None:
        """This rank raises an error, after which the others do not go on either.

        Raises RanksDisagree if it does so because another rank has raised.
        """
        if self._ended is not None:
            raise self._ended
        if not self.alone and self._failed is None:
            self._agreed("its end", 0.0, 0, reason, ends=True)

    def _agreed(
        self, at: str, ms: float, num_bytes: int, reason: str, ends: bool = False
    ) -> Outcome:
        """What all ranks state here; one that is elsewhere in the capture has failed in it."""
        facts = {"at": at, "ms": ms, "bytes": num_bytes, "reason": reason, "ends": ends}
        stated = self._exchange(self._topic, facts)
        if ranks := [rank for rank, one in enumerate(stated) if one["ends"]]:
            self._ended = _stopped(self._topic, stated, ranks)
        failed = by_rank(stated, "reason")
        if not failed and len({one["at"] for one in stated}) > 1:
            failed = [f"rank {rank} is at {one['at']}" for rank, one in enumerate(stated)]
        longest, most = (max(one[name] for one in stated) for name in ("ms", "bytes"))
        return longest, most, "; ".join(failed)


class OtherRankFailed(Exception):
    """Another rank has failed in the capture that this one is in."""
