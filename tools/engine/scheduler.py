"""Continuous batching: which tokens of which requests the next step computes.

Decoding requests come first, one token each; what is left of the token budget goes to prompts in
chunks, running ones before waiting ones, in the order of arrival. When blocks run out the request
admitted last gives up its blocks and is computed again later (preemption by recomputation): what
it has generated is kept and becomes part of what must be prefilled.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...errors import InvalidSetting, RequestTooLong
from .block_manager import BlockManager


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Temperature 0 is greedy; `top_k` 0 and `top_p` 1 exclude nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


GREEDY = SamplingParams()


@dataclass(slots=True, eq=False)
class Request:
    """One request in progress: `tokens` is the prompt followed by the generated tokens.

    `num_prefill` counts the tokens that were known when the request was admitted: until they are
    computed the request is in its prefill phase, even if one token is all that is missing.
    """

    id: int
    tokens: list[int]
    num_generate: int
    arrival: float = 0.0
    sampling: SamplingParams = GREEDY
    num_prompt: int = field(init=False)
    num_prefill: int = field(init=False)
    num_computed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prefill = len(self.tokens)

    @property
    def num_tokens_at_end(self) -> int:
        return self.num_prompt + self.num_generate

    @property
    def decoding(self) -> bool:
        return self.num_computed >= self.num_prefill

    @property
    def finished(self) -> bool:
        return len(self.tokens) == self.num_tokens_at_end


@dataclass(frozen=True, slots=True)
class Share:
    """A request's part of one step: its tokens at positions `start` … `start` + `query_len` - 1."""

    request: Request
    start: int
    query_len: int
    decoding: bool

    @property
    def context_len(self) -> int:
        """Tokens of the request that are in the cache once the step has run."""
        return self.start + self.query_len

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's last known token, so that a next one follows."""
        return self.context_len == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step's work; `shares` are in the order of their rows in the batch."""

    shares: tuple[Share, ...]
    preempted: tuple[Request, ...]

    @property
    def num_tokens(self) -> int:
        return sum(share.query_len for share in self.shares)

    @property
    def is_decode(self) -> bool:
        return all(share.decoding for share in self.shares)


class Scheduler:
    """Requests waiting and running under a token budget, a request limit and a block budget."""

    def __init__(self, blocks: BlockManager, *, max_num_tokens: int, max_num_reqs: int) -> None:
        if max_num_tokens < max_num_reqs:
            raise InvalidSetting(
                name="max_num_tokens",
                value=max_num_tokens,
                reason=f"{max_num_reqs} decoding requests need as many tokens a step",
                expected="at least max_num_reqs",
            )
        self.blocks = blocks
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self, request: Request) -> None:
        """Raise RequestTooLong when the whole cache could not hold the request."""
        if request.num_tokens_at_end > self.blocks.capacity:
            raise RequestTooLong(
                request=request.id,
                num_tokens=request.num_tokens_at_end,
                limit=self.blocks.capacity,
                limited_by="the KV cache",
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises what `check` raises."""
        self.check(request)
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Choose the next step's work and reserve its blocks."""
        shares: list[Share] = []
        preempted: list[Request] = []
        budget = self.max_num_tokens
        decode_first = sorted(self.running, key=lambda request: not request.decoding)
        for request in decode_first:
            if budget and request not in preempted:
                share = self._share(request, budget)
                if self._make_room(share, shares, preempted):
                    shares.append(share)
                    budget -= share.query_len
        if not preempted:
            shares.extend(self._admit(budget))
        return Schedule(tuple(shares), tuple(preempted))

    def finish(self, schedule: Schedule, sampled: Iterable[int]) -> list[Request]:
        """Record a step that has run; `sampled` has one token for each share that samples.

        Returns the requests that are complete; their blocks are free again.
        """
        tokens = iter(sampled)
        for share in schedule.shares:
            next_token = [next(tokens)] if share.samples else []
            share.request.num_computed = share.context_len
            share.request.tokens.extend(next_token)
        done = [share.request for share in schedule.shares if share.request.finished]
        for request in done:
            self.running.remove(request)
            self.blocks.free(request.id)
        return done

    def _share(self, request: Request, budget: int) -> Share:
        query_len = min(len(request.tokens) - request.num_computed, budget)
        return Share(request, request.num_computed, query_len, request.decoding)

    def _make_room(self, share: Share, shares: list[Share], preempted: list[Request]) -> bool:
        """Reserve the share's blocks, preempting requests without a share, the newest first."""
        while not self.blocks.grow(share.request.id, share.context_len):
            scheduled = [other.request for other in shares]
            victim = next(other for other in reversed(self.running) if other not in scheduled)
            self._preempt(victim)
            preempted.append(victim)
            if victim is share.request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.free(request.id)
        request.num_computed = 0
        self.waiting.appendleft(request)

    def _admit(self, budget: int) -> list[Share]:
        """Start waiting requests, oldest first, while tokens, requests and blocks last."""
        admitted: list[Share] = []
        while self.waiting and budget and len(self.running) < self.max_num_reqs:
            request = self.waiting[0]
            request.num_prefill = len(request.tokens)
            share = self._share(request, budget)
            if not self.blocks.grow(request.id, share.context_len):
                break
            self.running.append(self.waiting.popleft())
            admitted.append(share)
            budget -= share.query_len
        return admitted
