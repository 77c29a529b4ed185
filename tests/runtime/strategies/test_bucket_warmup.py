"""Bucket warm-up: the reference's golden vector, and budgets that are never exceeded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.dispatch import Bucket, Phase
from piecegraph.errors import UnknownWarmupStrategy
from piecegraph.runtime.strategy.bucket_warmup import AffineCosts, BucketWarmup, warm_buckets

PROMPT = [Bucket(batch, query, 0) for batch in (1, 2, 4) for query in (128, 256, 512, 1024)]
DECODE = [Bucket(batch, 1, context) for batch in (1, 2, 4, 8, 16) for context in (128, 256)]


def prompt_cost(bucket: Bucket) -> float:
    return 2 + bucket.batch * bucket.query / 128


def decode_cost(bucket: Bucket) -> float:
    return 4 + bucket.batch / 2


class Proportional:
    """The reference's model: what was used so far, in proportion to the work."""

    def __init__(self) -> None:
        self.work, self.used = 0.001, 0.0

    def estimate(self, work: int) -> float:
        return work / self.work * self.used

    def learn(self, work: int, num_bytes: float) -> None:
        self.work += work
        self.used += num_bytes


def reference_phases() -> tuple[BucketWarmup, BucketWarmup]:
    prompt = BucketWarmup(PROMPT, "min_tokens", Proportional(), prompt_cost)
    return prompt, BucketWarmup(DECODE, "max_bs", Proportional(), decode_cost)


def names(phase: BucketWarmup) -> str:
    return " ".join(
        f"{batch}x{query if bucket.phase is Phase.PROMPT else context}"
        for bucket in phase.graphed
        for batch, query, context in [bucket]
    )


def test_golden_vector_at_60() -> None:
    prompt, decode = reference_phases()
    warm_buckets(prompt, decode, 60)
    assert names(prompt) == "1x128 2x128 1x256"
    assert names(decode) == "16x128 16x256 8x128 8x256 2x128"
    assert (prompt.used, decode.used) == (11.0, 45.0)


def test_golden_vector_at_120() -> None:
    prompt, decode = reference_phases()
    warm_buckets(prompt, decode, 120)
    assert names(prompt) == "1x128 2x128 1x256 4x128 2x256 1x512 4x256"
    assert decode.complete
    assert names(decode).startswith("16x128 16x256 8x128")
    assert (prompt.used, decode.used) == (39.0, 71.0)


def test_an_affine_model_sees_the_constant_cost_and_keeps_the_budget_of_60() -> None:
    prompt, decode = affine_phases(2, 1 / 128, 4, 0.5)
    warm_buckets(prompt, decode, 60)
    assert decode.used <= 42 < 45
    assert prompt.used + decode.used <= 60


def affine_phases(a: float, b: float, c: float, d: float) -> tuple[BucketWarmup, BucketWarmup]:
    def prompt_bytes(bucket: Bucket) -> float:
        return a + b * bucket.batch * bucket.query

    def decode_bytes(bucket: Bucket) -> float:
        return c + d * bucket.batch

    prompt_probes = [(work, a + b * work) for work in (128, 4096)]
    decode_probes = [(work, c + d * work) for work in (1, 16)]
    return (
        BucketWarmup(PROMPT, "min_tokens", AffineCosts(prompt_probes), prompt_bytes),
        BucketWarmup(DECODE, "max_bs", AffineCosts(decode_probes), decode_bytes),
    )


cost = st.floats(0, 100)


@given(cost, cost, cost, cost, st.floats(0, 100_000), st.floats(0, 1))
def test_the_budget_is_never_overrun(
    a: float, b: float, c: float, d: float, budget: float, ratio: float
) -> None:
    prompt, decode = affine_phases(a, b, c, d)
    warm_buckets(prompt, decode, budget, ratio)
    assert prompt.used + decode.used <= budget + 1e-6


def test_leftovers_go_to_either_phase() -> None:
    prompt, decode = affine_phases(2, 1 / 128, 4, 0.5)
    warm_buckets(prompt, decode, 220, prompt_ratio=0.01)
    assert prompt.complete
    assert decode.complete
    prompt, decode = affine_phases(2, 1 / 128, 4, 0.5)
    warm_buckets(prompt, decode, 220, prompt_ratio=0.99)
    assert prompt.complete
    assert decode.complete


def test_an_unknown_order_is_refused() -> None:
    with pytest.raises(UnknownWarmupStrategy, match="min_tokens, max_bs"):
        BucketWarmup(PROMPT, "max_tokens", Proportional(), prompt_cost)
