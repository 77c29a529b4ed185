"""Continuous batching: which tokens of which requests the next step computes.

Decoding requests come first, one token and its drafts each; what is left of the token budget goes
to prompts in chunks, running ones before waiting ones, in the order of arrival. When blocks run out
the request admitted last gives up its blocks and is computed again later (preemption by
recomputation): what it has generated is kept and becomes part of what must be prefilled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from typing import TYPE_CHECKING

from ...errors import InvalidSetting, RequestTooLong
from .block_manager import BlockManager
from .drafts import Drafter

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are drawn: with `seed`, from the softmax at `temperature`.

    Temperature 0 takes the most likely token. Only the `top_k` most likely tokens are drawn (0:
    all), and of these the most likely ones that together reach the probability `top_p`. Raises
    InvalidSetting for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, is_valid, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "a finite number of 0 or more"),
            ("top_k", self.top_k >= 0, "0 or more tokens; 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "a probability above 0, at most 1"),
        ):
            if not is_valid:
                value, reason = getattr(self, name), "it is out of range"
                raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)


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
    lora: int | None = None
    sampling: SamplingParams = SamplingParams()
    image_rows: torch.Tensor | None = None
    """Of an image, (n, hidden size): for its first n tokens, zero where the prompt is text."""
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
    """A request's part of one step: its tokens at positions `start` … `start` + `query_len` - 1.

    The last of them may be `drafts`, guesses of the tokens that follow.
    """

    request: Request
    start: int
    query_len: int
    decoding: bool
    drafts: tuple[int, ...] = ()

    @property
    def context_len(self) -> int:
        """Tokens of the request, drafts included, that are in the cache once the step has run."""
        return self.start + self.query_len

    @property
    def tokens(self) -> list[int]:
        """What the step computes: known tokens, then drafts."""
        num_known = self.context_len - len(self.drafts)
        return [*self.request.tokens[self.start : num_known], *self.drafts]

    @property
    def samples(self) -> bool:
        """Whether the step computes the request's last known token, so that a next one follows.

        The rows of that token and of its drafts are sampled.
        """
        return self.context_len - len(self.drafts) == len(self.request.tokens)


@dataclass(frozen=True, slots=True)
class StepSchedule:
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

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        drafter: Drafter | None = None,
    ) -> None:
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
        self.drafter = drafter
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def check(self, request: Request) -> None:
        """Raise RequestTooLong when the whole cache could not hold the request."""
        num_tokens = request.num_tokens_at_end + (self.drafter.longest if self.drafter else 0)
        if num_tokens > self.blocks.capacity:
            raise RequestTooLong(
                request=request.id,
                num_tokens=num_tokens,
                limit=self.blocks.capacity,
                limited_by="the KV cache",
            )

    def add(self, request: Request) -> None:
        """Queue a request; raises what `check` raises."""
        self.check(request)
        self.waiting.append(request)

    def schedule(self) -> StepSchedule:
        """Choose the next step's work and reserve its blocks."""
        shares: list[Share] = []
        preempted: list[Request] = []
        budget = self.max_num_tokens
        decode_first = sorted(self.running, key=lambda request: not request.decoding)
        drafts = self._drafts()
        for request in decode_first:
            if budget and request not in preempted:
                share = self._share(request, budget, drafts.get(request.id, ()))
                if self._make_room(share, shares, preempted):
                    shares.append(share)
                    budget -= share.query_len
        if not preempted:
            shares.extend(self._admit(budget))
        return StepSchedule(tuple(shares), tuple(preempted))

    def finish(self, schedule: StepSchedule, sampled: Iterable[int]) -> list[Request]:
        """Record a step that has run; `sampled` has one token for each sampled row.

        A draft is accepted if it is the token sampled before it; the sampled tokens up to the first
        rejected draft are the request's. Returns the requests that are complete; their blocks are
        free again.
        """
        tokens = iter(sampled)
        for share in schedule.shares:
            new_tokens = [next(tokens) for _ in range(share.samples + len(share.drafts))]
            pairs = zip(share.drafts, new_tokens, strict=False)
            accepted = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            share.request.num_computed = share.context_len - len(share.drafts) + accepted
            missing = share.request.num_tokens_at_end - len(share.request.tokens)
            share.request.tokens.extend(new_tokens[: min(accepted + 1, missing)])
            if self.drafter is not None:
                self.drafter.count(len(share.drafts), accepted)
        done = [share.request for share in schedule.shares if share.request.finished]
        for request in done:
            self.running.remove(request)
            self.blocks.free(request.id)
        return done

    def _drafts(self) -> dict[int, tuple[int, ...]]:
        """Drafts by request, if the budget has room for them beside the prompts that wait."""
        decoding = [request for request in self.running if request.decoding]
        if self.drafter is None or not decoding:
            return {}
        most = self.drafter.most(len(decoding))
        prompts = [each for each in self.running if not each.decoding]
        prompts += islice(self.waiting, self.max_num_reqs - len(self.running))
        pending = sum(len(each.tokens) - each.num_computed for each in prompts)
        if (1 + most) * len(decoding) + pending > self.max_num_tokens:
            return {}
        return self.drafter.propose({each.id: each.tokens for each in decoding}, most)

    def _share(self, request: Request, budget: int, drafts: tuple[int, ...] = ()) -> Share:
        query_len = min(len(request.tokens) - request.num_computed + len(drafts), budget)
        return Share(request, request.num_computed, query_len, request.decoding, drafts)

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
