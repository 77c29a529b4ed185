"""The Triton attention kernel against plain code: run by test_triton_attention in a process of its
own, with Triton's interpreter."""

import functools
import random
import sys
from copy import deepcopy
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from piecegraph import BatchDescriptor, ReplayBackend, ReplayOptions, RuntimeMode, prepare
from piecegraph.tools.engine import triton_attention
from piecegraph.tools.engine.metadata import NO_SLOT
from piecegraph.tools.serve import run as main_job

from . import attention_batches
from .attention_batches import attend, buffers_of
from .conftest import ONE_LAYER, started

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


class Batch(attention_batches.Batch):
    """Blocks that nobody owns, and rows of padding, are NaN."""

    def __init__(self, shapes, **form):
        super().__init__(shapes, **form)
        for part in (self.cache.keys, self.cache.values):
            part[self.blocks.free_blocks] = torch.nan

    def run(self, padding=0, **how):
        """The output, and what the cache holds then. The batch can run again."""
        before = self.cache
        self.cache = deepcopy(before)
        output, self.cache, cache = super().run(padding, **how), before, self.cache
        return output, cache


DECODES = st.tuples(st.integers(0, 40), st.just(1))
CHUNKS = st.tuples(st.integers(0, 20), st.integers(1, 20))
SHAPES = st.lists(st.one_of(DECODES, CHUNKS), min_size=1, max_size=5)
FORMS = st.fixed_dictionaries(
    {
        "kv_heads": st.sampled_from((1, 2)),
        "group": st.sampled_from((1, 2, 3, 4, 8, 20)),
        "dim": st.sampled_from((4, 16, 24)),
        "block": st.sampled_from((1, 3, 4, 16)),
        "window": st.sampled_from((0, 0, 1, 3, 17, 100)),
        "parts": st.sampled_from((1, 2, 5)),
    }
)
GQA_WITH_WINDOW = {"kv_heads": 2, "group": 3, "dim": 24, "block": 3, "window": 7, "parts": 3}
WIDE_GROUP = {"kv_heads": 1, "group": 20, "dim": 16, "block": 4, "window": 0, "parts": 1}


def error(dtype, shapes, form, padding=0):
    """The largest difference of the kernel's rows from plain code's; the rest must be equal."""
    form = dict(form)
    parts = form.pop("parts", 1)
    batch = Batch(shapes, heads=form.pop("group") * form["kv_heads"], dtype=dtype, **form)
    expected, plain_cache = batch.run(triton=False)
    with patch.object(triton_attention, "parts_of", lambda *_: parts):
        output, cache = batch.run(padding, triton=True)
    assert (output[batch.total :] == 0).all()
    for one, other in ((cache.keys, plain_cache.keys), (cache.values, plain_cache.values)):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    return (output[: batch.total].float() - expected.float()).abs().max().item()


MIXED = [(40, 1), (0, 17), (13, 20)]


@pytest.mark.parametrize(
    ("dtype", "form"),
    [
        (torch.float32, GQA_WITH_WINDOW),
        (torch.bfloat16, WIDE_GROUP),
        pytest.param(torch.float32, WIDE_GROUP, marks=pytest.mark.heavy),
        pytest.param(torch.bfloat16, GQA_WITH_WINDOW, marks=pytest.mark.heavy),
    ],
    ids=str,
)
def test_mixed_batches_agree_with_plain_code(dtype, form):
    assert error(dtype, MIXED, form, padding=3) <= TOLERANCE[dtype]


@pytest.mark.heavy
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@settings(max_examples=5, phases=[Phase.explicit, Phase.generate], derandomize=True)
@example(shapes=[(20, 1), (0, 17), (13, 20)], padding=3, form=GQA_WITH_WINDOW)
@given(shapes=SHAPES, form=FORMS, padding=st.integers(0, 7))
def test_random_batches_agree_with_plain_code(dtype, shapes, form, padding):
    assert error(dtype, shapes, form, padding) <= TOLERANCE[dtype]


def test_a_requests_result_does_not_depend_on_the_others():
    """By a bit: tiles begin with a request."""
    dtype = torch.float32
    alone = Batch([(9, 5)], dtype=dtype)
    among = Batch([(30, 1), (9, 5), (0, 17)], dtype=dtype)
    among.cache = deepcopy(alone.cache)
    slots = {i: b.blocks.slots(r, 0, 14) for i, (b, r) in enumerate([(alone, 0), (among, 1)])}
    for part, source in (
        (among.cache.keys, alone.cache.keys),
        (among.cache.values, alone.cache.values),
    ):
        part.flatten(0, 1)[slots[1]] = source.flatten(0, 1)[slots[0]]
    for mine, theirs in zip(among.inputs, alone.inputs, strict=True):
        mine[1:6] = theirs
    assert torch.equal(alone.run(triton=True)[0], among.run(9, triton=True)[0][1:6])


def test_a_token_without_a_slot_is_not_written():
    batch = Batch([(9, 1), (0, 6)], dtype=torch.float32)
    written = batch.run(triton=True)[1]

    def change(metadata):
        metadata.slot_mapping[0] = NO_SLOT

    cache = batch.run(triton=True, change=change)[1]
    slot = batch.blocks.slots(0, 9, 10)[0]
    for before, now, all_of_them in zip(
        (batch.cache.keys, batch.cache.values),
        (cache.keys, cache.values),
        (written.keys, written.values),
        strict=True,
    ):
        before, now, all_of_them = (
            x.flatten(0, 1).nan_to_num(7) for x in (before, now, all_of_them)
        )
        assert torch.equal(now[slot], before[slot])
        now[slot] = all_of_them[slot]
        assert torch.equal(now, all_of_them)


def test_a_capture_of_padding_writes_nothing():
    batch = Batch([(9, 3)], dtype=torch.float32)
    buffers = buffers_of(8, triton=True)
    for mode in RuntimeMode:
        metadata = buffers.padding(BatchDescriptor(3, 2), mode)
        cache = deepcopy(batch.cache)
        assert (attend(batch.inputs, cache, metadata) == 0).all()
        assert torch.equal(cache.keys.nan_to_num(7), batch.cache.keys.nan_to_num(7))


@pytest.fixture
def served(monkeypatch, traced_once):
    """Serves a few requests with small graphs; returns their tokens, the steps and the verdict."""

    def serve(replay=None, **options):
        backend = ReplayBackend(ReplayOptions(poison_before_replay=True, **(replay or {})))
        monkeypatch.setattr(main_job, "prepare", functools.partial(prepare, backend=backend))
        small = {
            "requests": 3, "length_scale": 0.01, "max_num_reqs": 2, "mode": "full",
            "capture_sizes": "4,12", "verify": "all", "attention": "triton",
        }  # fmt: skip
        with started(**small | options) as engine:
            tokens = engine.serve()
            return tokens, engine.service.engine.log.steps, engine.service.verification

    return serve


FEATURES = {
    "graphs of mixed batches": {},
    "PIECEWISE": {"mode": "full-and-piecewise"},
    "windows": {"model": f"{ONE_LAYER},window=4", "mode": "none"},
    "no graphs": {"mode": "none"},
    "drafts": {"speculate": 2, "mode": "full-and-piecewise"},
    "LoRA": {"lora": 2},
    "preemption": {"kv_blocks": 12, "block_size": 2, "requests": 5, "length_scale": 0.02},
}


@pytest.mark.parametrize(
    "feature",
    [
        pytest.param(name, marks=[pytest.mark.heavy] * bool(options))
        for name, options in FEATURES.items()
    ],
)
def test_the_main_job_serves_the_tokens_of_plain_code(served, feature):
    options = FEATURES[feature]
    expected = served(**{**options, "attention": "plain"})[0]
    tokens, steps, verification = served(**options)
    assert tokens == expected
    assert verification.ok, verification.mismatch
    if not options:
        assert {step.mode for step in steps} == {"FULL"}
        assert any(step.num_tokens > step.num_reqs for step in steps)  # with prompts


def test_overlapped_steps_on_graphs_of_mixed_batches(served):
    replay = {"delay": True, "fail_on_early_writes": True, "delay_seed": 1}
    tokens = served(replay, overlap=True, verify="none")[0]
    assert tokens == served(attention="plain", mode="none")[0]


def table(cases):
    """The largest difference of each form."""
    drawn = random.Random(0)
    for dtype in TOLERANCE:
        for group, window in ((1, 0), (4, 0), (8, 0), (4, 9)):
            found = []
            for _ in range(cases):
                shapes = [
                    (drawn.randrange(41), drawn.choice((1, 1, drawn.randrange(1, 21))))
                    for _ in range(drawn.randrange(1, 6))
                ]
                form = {"kv_heads": 2, "group": group, "dim": 16, "block": 16, "window": window}
                found.append(error(dtype, shapes, form))
            name = str(dtype).removeprefix("torch.")
            yield f"| {name} | {group} | {window or 'none'} | {cases} | {max(found):.1e} |"


if __name__ == "__main__":
    print(*table(int(sys.argv[1])), sep="\n")
