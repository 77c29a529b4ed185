"""Speculative decoding without a second model: drafts are read from the request's own tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

LONGEST = 3
"""Tokens that are looked up at most: the longest suffix that occurred before decides."""


class Drafter:
    """Proposes drafts, and counts how many were verified and accepted.

    `schedule[i]` is the number of drafts of a request when `i + 1` requests decode.
    """

    def __init__(self, schedule: Sequence[int]) -> None:
        self.schedule = tuple(schedule)
        self.proposed = self.accepted = 0

    @property
    def longest(self) -> int:
        """The most drafts that a request ever has."""
        return max(self.schedule)

    def most(self, num_reqs: int) -> int:
        """Drafts for each of `num_reqs` requests."""
        return self.schedule[min(num_reqs, len(self.schedule)) - 1]

    def propose(self, texts: Mapping[int, Sequence[int]], most: int) -> dict[int, tuple[int, ...]]:
        """`most` drafts for each of `texts`, the tokens by request; none if nothing is found.

        Query lengths are equal, as FULL graphs of decode need them: where fewer are found, the last
        one is repeated. Drafts beyond the end of a request are sampled and dropped.
        """
        drafts_by_request = {each: ngram_drafts(tokens, most) for each, tokens in texts.items()}
        if not any(drafts_by_request.values()):
            return {}
        return {
            each: (*drafts, *[(drafts or texts[each])[-1]] * (most - len(drafts)))
            for each, drafts in drafts_by_request.items()
        }

    def count(self, proposed: int, accepted: int) -> None:
        self.proposed += proposed
        self.accepted += accepted


def ngram_drafts(tokens: Sequence[int], most: int) -> tuple[int, ...]:
    """What followed the last tokens where they occurred last, at most `most` tokens."""
    for length in range(min(LONGEST, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        for start in range(len(tokens) - length - 1, -1, -1):
            if tokens[start : start + length] == suffix:
                return tuple(tokens[start + length : start + length + most])
    return ()
