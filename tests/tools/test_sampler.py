"""Sampling: greedy is the best token, filters keep only what they must, warm-up keeps state."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.tools.engine.sampler import CONFIGURATIONS, Sampler, sampler_warmup
from piecegraph.tools.engine.scheduler import GREEDY, SamplingParams

CPU = torch.device("cpu")


def allowed(logits: list[float], params: SamplingParams) -> set[int]:
    """The tokens that may be drawn, by the definitions."""
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    order = order[: params.top_k or len(order)]
    weights = torch.tensor([logits[t] for t in order]).div(params.temperature).softmax(0).tolist()
    kept, total = set(), 0.0
    for token, weight in zip(order, weights, strict=True):
        if kept and total >= params.top_p + 1e-6:
            break
        kept.add(token)
        total += weight
    return kept


@given(
    st.lists(st.integers(-20, 20), min_size=2, max_size=8, unique=True),
    st.builds(
        SamplingParams,
        st.sampled_from([0.3, 0.7, 1.0, 1.5]),
        st.sampled_from([0.2, 0.5, 0.9, 1.0]),
        st.integers(0, 9),
    ),
    st.integers(0, 5),
)
def test_only_what_the_filters_keep_is_drawn(
    scores: list[int], params: SamplingParams, seed: int
) -> None:
    logits = [score / 10 for score in scores]
    rows = torch.tensor([logits, logits])
    sampler = Sampler(seed=seed, device=CPU)
    sampled, greedy = sampler.sample(rows, [params, GREEDY])
    assert sampled in allowed(logits, params)
    assert greedy == logits.index(max(logits))


def test_draws_follow_the_temperature() -> None:
    logits = torch.tensor([[0.0, 1.0]]).expand(4000, 2)
    sampler = Sampler(seed=0, device=CPU)
    drawn = sampler.sample(logits, [SamplingParams(0.5)] * 4000)
    share = torch.tensor([0.0, 2.0]).softmax(0)[1].item()
    assert sum(drawn) / 4000 == pytest.approx(share, abs=0.03)


def test_greedy_takes_the_first_of_equals() -> None:
    assert Sampler(seed=0, device=CPU).sample(torch.tensor([[1.0, 3.0, 3.0]]), [GREEDY]) == [1]


def test_parameters_of_a_changed_batch_are_used() -> None:
    rows = torch.tensor([[0.0, 5.0]])
    sampler = Sampler(seed=0, device=CPU)
    assert sampler.sample(rows, [SamplingParams(1.0, top_k=1)]) == [1]
    assert {sampler.sample(rows, [SamplingParams(100.0)])[0] for _ in range(50)} == {0, 1}


def test_the_twelve_configurations_run_for_each_batch_size_and_leave_no_trace() -> None:
    calls = []

    class Watched(Sampler):
        def sample(self, logits, params):  # type: ignore[no-untyped-def]
            calls.append((len(logits), params[0], self._params == tuple(params)))
            return super().sample(logits, params)

    sampler = Watched(seed=0, device=CPU)
    before = sampler.generator.get_state()
    task = sampler_warmup(sampler, lambda hidden: hidden[:, :50], [4, 2, 4, 0], torch.zeros(1, 64))
    assert task.shapes == (1, 4, 2)
    for shape in task.shapes:
        task.run(shape)
    assert len(calls) == 12 * 3
    assert [params for rows, params, _ in calls if rows == 4][::2] == list(CONFIGURATIONS)
    drawn = [unchanged for _, params, unchanged in calls if params.temperature]
    assert drawn == [False, True] * 5 * 3
    assert torch.equal(sampler.generator.get_state(), before)
    assert sampler._params == ()
