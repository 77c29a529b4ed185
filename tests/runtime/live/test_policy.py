"""Everything that dispatch decides can be set in `Config`, and is correct on a prepared model.

The op reads host values of the step (adapters, micro-batches), which a FULL graph freezes: a wrong
dispatch key gives a wrong result.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from piecegraph import (
    Batch,
    ForwardContext,
    GraphMode,
    PaddingLimit,
    PreparedModel,
    RuntimeMode,
    forward_context,
    get_forward_context,
)
from piecegraph.dispatch import NO_GRAPH, Axis, CaptureStrategy, LoraGraphs, Reason
from piecegraph.errors import BatchInvalid, DecisionNotPossible, NoModeLeft, StaleContext

from ..conftest import compile_once, prepare_on_replay

MAX_TOKENS, HIDDEN = 32, 4
FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE


@dataclass
class Host:
    """Host values of a step."""

    loras: int = 0
    micro_batches: int = 1
    prefix_chunks: int = 0

    @classmethod
    def of(cls, descriptor, mode=FULL):
        return cls(descriptor.lora_case, **dict(descriptor.axes))


@dataclass
class Adapters:
    """The layer: a weight for each adapter, the adapter of each row (-1: none), and chunks of a
    prefix, zeros from the last one of the step on."""

    weights: Tensor
    of_row: Tensor
    prefix: Tensor


def mix(x, out, layer_name):
    """Add each row's adapter and the prefix, looping over adapters and chunks on the host; scale by
    the micro-batches."""
    context = get_forward_context()
    layer, host = context.layers[layer_name], context.metadata
    result = x.clone()
    for adapter in range(min(host.loras, len(layer.weights))):
        mine = (layer.of_row[: len(x)] == adapter)[:, None]
        result += mine * (x * layer.weights[adapter])
    for chunk in range(host.prefix_chunks):
        result += layer.prefix[chunk]
    out.copy_(result * host.micro_batches)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)

    def forward(self, x):
        x = x * self.scale
        out = torch.empty_like(x)
        torch.ops.policy_tests.mix(x, out, "adapters")
        return (out + x).relu()


@pytest.fixture(scope="module")
def compiled(temporary_op):
    schema = "(Tensor x, Tensor(a!) out, str layer_name) -> ()"
    return compile_once(
        Model(),
        splitting_ops=(temporary_op("policy_tests::mix", schema, mix),),
        inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
        max_num_tokens=MAX_TOKENS,
        max_num_reqs=MAX_TOKENS,
        attention={"support": "ALWAYS"},
    )


@dataclass
class Engine:
    prepared: PreparedModel
    model: nn.Module
    adapters: Adapters

    def step(self, batch, host=None, **modes):
        """One step; its result must equal the plain model's bit for bit."""
        x = torch.randn(batch.num_tokens, HIDDEN)
        self.adapters.of_row[: batch.num_tokens] = torch.randint(
            -1, batch.num_loras, (batch.num_tokens,)
        )
        host = host or Host(batch.num_loras)
        self.adapters.prefix[: host.prefix_chunks] = torch.rand(host.prefix_chunks, HIDDEN)
        self.adapters.prefix[host.prefix_chunks :] = 0
        decision = self.prepared.dispatch(batch, **modes)
        if decision.graph_index != NO_GRAPH and decision.mode is FULL:
            metadata = Host.of(decision.descriptor)
        else:
            metadata = host
        result = self.prepared.run(decision, x, metadata=metadata).clone()
        assert torch.equal(result, self.expected(x, host))
        return decision

    def follow(self, decision, batch, num_reqs):
        """Another rank runs a step of fewer requests by this decision."""
        num_tokens = batch.num_tokens * num_reqs // batch.num_reqs
        if batch.query_len is None and batch.max_query_len is not None:
            num_tokens = min(num_tokens, num_reqs * batch.max_query_len)
        theirs = replace(batch, num_tokens=num_tokens, num_reqs=num_reqs)
        try:
            followed = self.prepared.dispatcher.follow(decision.graph_index, theirs)
        except DecisionNotPossible:  # too much padding
            assert self.prepared.config.sizes.padding_limit is not None
            return
        x, host = torch.randn(num_tokens, HIDDEN), Host(batch.num_loras, **(batch.axes or {}))
        whole = followed.graph_index != NO_GRAPH and followed.mode is FULL
        metadata = Host.of(followed.descriptor) if whole else host
        result = self.prepared.run(followed, x, metadata=metadata).clone()
        assert followed.mode is decision.mode
        assert torch.equal(result, self.expected(x, host))

    def expected(self, x, host):
        """What the plain model returns."""
        context = ForwardContext({"adapters": self.adapters})
        context.metadata = host
        with forward_context(context):
            return self.model(x)


@pytest.fixture
def engine(compiled):
    def make(mode="FULL_AND_PIECEWISE", graph_sizes=(4, 8, 12), **settings):
        base, traced = compiled
        model = Model()
        adapters = Adapters(
            torch.rand(4, HIDDEN), torch.full((MAX_TOKENS,), -1), torch.ones(8, HIDDEN)
        )
        prepared = prepare_on_replay(
            replace(traced, model=model, conditions=None).rebound(),
            base.changed(**settings), GraphMode(mode), graph_sizes, {"adapters": adapters}, {},
        )  # fmt: skip
        prepared.capture(Host.of)
        return Engine(prepared, model, adapters)

    return make


def decode(num_reqs, query_len=1, **facts):
    return Batch(num_reqs * query_len, num_reqs, is_decode=True, query_len=query_len, **facts)


@pytest.mark.parametrize(
    ("graphs", "cases"),
    [("one", [4, 4, 4, 4]), ("with_and_without", [0, 4, 4, 4]), ("by_count", [0, 1, 2, 4])],
)
def test_failure_8_lora_batches_have_graphs(engine, graphs, cases):
    it = engine(variants={"max_loras": 3, "lora_graphs": graphs})
    for active, case in enumerate(cases):
        for batch, mode in (
            (decode(3, num_loras=active), FULL),
            (Batch(7, 2, num_loras=active), PIECEWISE),
        ):
            decision = it.step(batch)
            assert (decision.mode, decision.descriptor.lora_case) == (mode, case)


def test_failure_4_each_query_length_has_its_own_full_graphs(engine):
    it = engine(variants={"query_lens": (1, 3)})
    for query_len, num_reqs, padded in ((1, 3, 4), (3, 3, 9), (3, 1, 6)):
        decision = it.step(decode(num_reqs, query_len))
        assert (decision.mode, decision.descriptor.num_tokens) == (FULL, padded)
        assert decision.descriptor.uniform_query_len == query_len
    assert it.step(decode(2, 2)).mode is PIECEWISE


def test_decode_of_different_query_lengths_up_to_a_bound(engine):
    it = engine(variants={"query_lens": 3}, attention={"varlen_decode": True})
    decision = it.step(Batch(7, 3, is_decode=True, max_query_len=3))
    assert (decision.mode, decision.descriptor.max_query_len) == (FULL, 3)
    assert it.step(Batch(7, 2, is_decode=True, max_query_len=4)).mode is PIECEWISE


MICRO_BATCHES = Axis("micro_batches", (1, 2))
PREFIX_CHUNKS = Axis("prefix_chunks", (0, 1, 4), rounds_up=True)
"""A graph that loops over more chunks than a step has is right: the others are empty."""


@pytest.mark.parametrize(
    ("axis", "numbers"),
    [
        (MICRO_BATCHES, {2: 2, 1: 1, 3: None}),
        (PREFIX_CHUNKS, {0: 0, 1: 1, 2: 4, 4: 4, 5: None}),
    ],
)
def test_the_number_of_micro_batches_or_prefix_chunks_is_in_the_key(engine, axis, numbers):
    it = engine("FULL", variants={"axes": (axis,)})
    for number, captured in [*numbers.items()] * 2:
        decision = it.step(Batch(5, 2, axes={axis.name: number}), Host(**{axis.name: number}))
        if captured is None:
            assert (decision.mode, decision.reason) == (NONE, Reason.AXIS)
        else:
            assert (decision.mode, decision.descriptor.axes) == (FULL, ((axis.name, captured),))
    with pytest.raises(BatchInvalid, match=axis.name):
        it.step(Batch(5, 2))


@pytest.mark.parametrize("host", [Host(micro_batches=2), Host(prefix_chunks=2), Host(loras=2)])
def test_failure_5_a_host_value_that_is_not_in_the_key_is_an_error(engine, host):
    it = engine("FULL")
    it.adapters.of_row[:] = 0
    x = torch.randn(4, HIDDEN)
    decision = it.prepared.dispatch(Batch(4, 2))
    with pytest.raises(StaleContext):
        it.prepared.run(decision, x, metadata=host)
    assert torch.equal(it.prepared.run(decision, x, metadata=Host()), it.expected(x, Host()))


def test_modes_are_allowed_and_excluded_for_one_step(engine):
    it = engine()
    assert it.step(decode(4)).mode is FULL
    assert it.step(decode(4), excluded_modes={FULL}).mode is PIECEWISE
    assert it.step(decode(4), allowed_modes={NONE}).mode is NONE
    assert it.step(decode(4)).mode is FULL
    with pytest.raises(NoModeLeft):
        it.step(Batch(9, 2), allowed_modes={FULL})


def test_lazy_captures_a_graph_of_an_allowed_mode(engine):
    it = engine(strategy="lazy", graph_sizes=(4, 8))
    decisions = [it.step(decode(3), excluded_modes={FULL}) for _ in range(3)]
    assert (decisions[-1].mode, decisions[-1].descriptor.num_tokens) == (PIECEWISE, 4)


def random_settings(draw):
    axes = {
        "micro_batches": Axis("micro_batches", (1, 2)),
        "prefix_chunks": Axis("prefix_chunks", (0, 2, 4), rounds_up=True),
    }
    lengths = sorted(draw.sample(range(1, 5), draw.randint(1, 2)))
    return {
        "mode": draw.choice(list(GraphMode)),
        "graph_sizes": sorted(draw.sample(range(1, 20), draw.randint(1, 3))),
        "variants": {
            "max_loras": draw.choice((0, 1, 3)),
            "lora_graphs": draw.choice(list(LoraGraphs)),
            "query_lens": lengths,
            "axes": [axes[name] for name in sorted(axes) if draw.random() < 0.4],
        },
        "attention": {"varlen_decode": draw.random() < 0.3},
        "sizes": {
            "padding_limit": draw.choice((None, PaddingLimit(factor=1.5), PaddingLimit(tokens=2))),
            "alignment": draw.choice((1, 1, 2)),
        },
        "strategy": draw.choice(list(CaptureStrategy)),
    }


def random_batch(draw, axes):
    host = {axis.name: draw.choice((*axis.values, max(axis.values) - 1)) for axis in axes}
    num_loras = draw.choice((0, 0, 1, 2, 3, 4))
    lengths = [draw.randint(1, 4) for _ in range(draw.randint(1, 8))]
    kind = draw.choice(("mixed", "uniform", "bounded", "unknown"))
    if kind == "uniform":
        lengths = [lengths[0]] * len(lengths)
    return Batch(
        sum(lengths),
        len(lengths),
        is_decode=kind != "mixed",
        query_len=lengths[0] if kind == "uniform" else None,
        num_loras=num_loras,
        max_query_len=max(lengths) if kind == "bounded" else None,
        cascade=draw.random() < 0.1,
        axes=host or None,
    )


MORE = [pytest.param(seed, marks=pytest.mark.heavy) for seed in range(6, 300)]


@pytest.mark.parametrize("seed", [*range(6), *MORE])
def test_all_of_it_together(engine, seed):
    """Random plans, batches, modes of one step, ranks that follow, and released graphs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    settings = random_settings(draw)
    it = engine(**settings)
    for _ in range(25):
        batch = random_batch(draw, settings["variants"]["axes"])
        modes = set(RuntimeMode) if draw.random() < 0.8 else {NONE, draw.choice(list(RuntimeMode))}
        host = Host(batch.num_loras, **(batch.axes or {}))
        decision = it.step(batch, host, allowed_modes=modes)
        it.follow(decision, batch, draw.randint(0, batch.num_reqs))
        event = draw.random()
        if event < 0.05:
            it.prepared.release()
            it.prepared.capture()
    steps = sum(row["count"] for row in it.prepared.usage.rows())
    assert steps == sum(row["count"] for row in it.prepared.usage.reasons())
