"""Everything that dispatch decides can be set in `Config`, and is correct on a prepared model.

The op reads host values of the step (adapters, micro-batches), which a FULL graph freezes: a wrong
dispatch key gives a wrong result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from piecegraph import (
    Batch,
    BatchDescriptor,
    Config,
    Decision,
    ForwardContext,
    GraphMode,
    PreparedModel,
    RuntimeMode,
    forward_context,
    get_forward_context,
)
from piecegraph.compile.lower.compiled_model import CompiledModel, bind
from piecegraph.dispatch import NO_GRAPH, Axis, Reason
from piecegraph.errors import BatchInvalid, FullModeUnsupported, NoModeLeft
from piecegraph.runtime.policy import dispatch_plan, resolve_graph_mode

from ..conftest import compile_once, prepare_on_replay

MAX_TOKENS, HIDDEN = 32, 4
FULL, PIECEWISE, NONE = RuntimeMode.FULL, RuntimeMode.PIECEWISE, RuntimeMode.NONE


@dataclass
class Host:
    """Host values of a step."""

    loras: int = 0
    micro_batches: int = 1

    @classmethod
    def of(cls, descriptor: BatchDescriptor, mode: RuntimeMode = FULL) -> Host:
        return cls(descriptor.lora_case, dict(descriptor.axes).get("micro_batches", 1))


@dataclass
class Adapters:
    """The layer: a weight for each adapter, and the adapter of each row (-1: none)."""

    weights: Tensor
    of_row: Tensor


def mix(x: Tensor, out: Tensor, layer_name: str) -> None:
    """Add each row's adapter, looping over adapters on the host; scale by the micro-batches."""
    context = get_forward_context()
    layer, host = context.layers[layer_name], context.metadata
    result = x.clone()
    for adapter in range(min(host.loras, len(layer.weights))):
        mine = (layer.of_row[: len(x)] == adapter)[:, None]
        result += mine * (x * layer.weights[adapter])
    out.copy_(result * host.micro_batches)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        out = torch.empty_like(x)
        torch.ops.policy_tests.mix(x, out, "adapters")
        return (out + x).relu()


@pytest.fixture(scope="module")
def compiled(temporary_op: Callable[..., str]) -> tuple[Config, CompiledModel]:
    schema = "(Tensor x, Tensor(a!) out, str layer_name) -> ()"
    return compile_once(
        Model(),
        splitting_ops=(temporary_op("policy_tests::mix", schema, mix),),
        inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
        max_num_tokens=MAX_TOKENS,
        max_num_reqs=MAX_TOKENS,
        attention_support="ALWAYS",
    )


@dataclass
class Engine:
    prepared: PreparedModel
    model: nn.Module
    adapters: Adapters

    def step(self, batch: Batch, host: Host | None = None, **modes: Any) -> Decision:
        """One step; its result must equal the plain model's bit for bit."""
        x = torch.randn(batch.num_tokens, HIDDEN)
        self.adapters.of_row[: batch.num_tokens] = torch.randint(
            -1, batch.num_loras, (batch.num_tokens,)
        )
        host = host or Host(batch.num_loras)
        decision = self.prepared.dispatch(batch, **modes)
        if decision.graph_index != NO_GRAPH and decision.mode is FULL:
            metadata = Host.of(decision.descriptor)
        else:
            metadata = host
        result = self.prepared.run(decision, x, metadata=metadata).clone()
        context = ForwardContext({"adapters": self.adapters})
        context.metadata = host
        with forward_context(context):
            assert torch.equal(result, self.model(x))
        return decision


@pytest.fixture
def engine(compiled: tuple[Config, CompiledModel]) -> Callable[..., Engine]:
    def make(mode: str = "FULL_AND_PIECEWISE", sizes: Any = (4, 8, 12), **settings: Any) -> Engine:
        base, traced = compiled
        model = Model()
        adapters = Adapters(torch.rand(4, HIDDEN), torch.full((MAX_TOKENS,), -1))
        prepared = prepare_on_replay(
            bind(traced.plan, traced.pieces, model, from_bundle=False),
            base.changed(**settings), GraphMode(mode), sizes, {"adapters": adapters}, {},
        )  # fmt: skip
        prepared.capture(Host.of)
        return Engine(prepared, model, adapters)

    return make


def decode(num_reqs: int, query_len: int = 1, **facts: Any) -> Batch:
    return Batch(num_reqs * query_len, num_reqs, is_decode=True, query_len=query_len, **facts)


@pytest.mark.parametrize(
    ("graphs", "cases"),
    [("one", [4, 4, 4, 4]), ("with_and_without", [0, 4, 4, 4]), ("by_count", [0, 1, 2, 4])],
)
def test_failure_8_lora_batches_have_graphs(
    engine: Callable[..., Engine], graphs: str, cases: list[int]
) -> None:
    it = engine(max_loras=3, lora_graphs=graphs)
    for active, case in enumerate(cases):
        for batch, mode in (
            (decode(3, num_loras=active), FULL),
            (Batch(7, 2, num_loras=active), PIECEWISE),
        ):
            decision = it.step(batch)
            assert (decision.mode, decision.descriptor.lora_case) == (mode, case)


def test_failure_4_each_query_length_has_its_own_full_graphs(engine: Callable[..., Engine]) -> None:
    it = engine(query_lens=(1, 3))
    for query_len, num_reqs, padded in ((1, 3, 4), (3, 3, 9), (3, 1, 6)):
        decision = it.step(decode(num_reqs, query_len))
        assert (decision.mode, decision.descriptor.num_tokens) == (FULL, padded)
        assert decision.descriptor.uniform_query_len == query_len
    assert it.step(decode(2, 2)).mode is PIECEWISE


def test_decode_of_different_query_lengths_up_to_a_bound(engine: Callable[..., Engine]) -> None:
    it = engine(query_len=3, traits={"varlen_decode": True})
    decision = it.step(Batch(7, 3, is_decode=True, max_query_len=3))
    assert (decision.mode, decision.descriptor.max_query_len) == (FULL, 3)
    assert it.step(Batch(7, 2, is_decode=True, max_query_len=4)).mode is PIECEWISE


def test_a_host_value_is_in_the_key(engine: Callable[..., Engine]) -> None:
    it = engine("FULL", axes=(Axis("micro_batches", (1, 2)),))
    for micro in (2, 1, 2):
        decision = it.step(Batch(5, 2, axes={"micro_batches": micro}), Host(0, micro))
        assert (decision.mode, decision.descriptor.axes) == (FULL, (("micro_batches", micro),))
    missing = it.step(Batch(5, 2, axes={"micro_batches": 3}), Host(0, 3))
    assert (missing.mode, missing.reason) == (NONE, Reason.AXIS)
    with pytest.raises(BatchInvalid, match="micro_batches"):
        it.step(Batch(5, 2))


def test_modes_are_allowed_and_excluded_for_one_step(engine: Callable[..., Engine]) -> None:
    it = engine()
    assert it.step(decode(4)).mode is FULL
    assert it.step(decode(4), excluded_modes={FULL}).mode is PIECEWISE
    assert it.step(decode(4), allowed_modes={NONE}).mode is NONE
    assert it.step(decode(4)).mode is FULL
    with pytest.raises(NoModeLeft):
        it.step(Batch(9, 2), allowed_modes={FULL})


def test_lazy_captures_a_graph_of_an_allowed_mode(engine: Callable[..., Engine]) -> None:
    it = engine(strategy="lazy", sizes=(4, 8))
    decisions = [it.step(decode(3), excluded_modes={FULL}) for _ in range(3)]
    assert (decisions[-1].mode, decisions[-1].descriptor.num_tokens) == (PIECEWISE, 4)


def test_measured_costs_decide(engine: Callable[..., Engine]) -> None:
    it = engine()
    entries = it.prepared.dispatcher.plan.entries
    costs = {index: 9.0 if entry.mode is FULL else 1.0 for index, entry in enumerate(entries)}
    it.prepared.dispatcher.set_costs(costs, none_cost=lambda tokens: 0.5 * tokens)
    assert it.step(decode(4)).mode is PIECEWISE
    assert it.step(decode(1)).mode is NONE


def test_another_ranks_decision_is_followed(engine: Callable[..., Engine]) -> None:
    it = engine()
    wide = it.prepared.dispatch(decode(8))
    followed = it.prepared.dispatcher.follow(wide.graph_index, decode(3))
    x = torch.randn(3, HIDDEN)
    result = it.prepared.run(followed, x, metadata=Host())
    assert torch.equal(result, (x * it.model.scale + x * it.model.scale).relu())
    assert (followed.graph_index, followed.reason) == (wide.graph_index, Reason.RANK_DECISION)


def test_a_rank_without_requests_runs_the_step_of_the_others(
    engine: Callable[..., Engine],
) -> None:
    it = engine()
    for batch in (decode(3), Batch(5, 2), Batch(20, 2)):
        decision = it.step(batch)
        followed = it.prepared.dispatcher.follow(decision.graph_index, Batch(0, 0))
        result = it.prepared.run(followed, torch.empty(0, HIDDEN), metadata=Host())
        assert result.shape == (0, HIDDEN)
    steps = {(row["mode"], row["num_tokens"]): row["count"] for row in it.prepared.usage.rows()}
    assert steps == {("FULL", 4): 2, ("PIECEWISE", 8): 2, ("NONE", 20): 1, ("NONE", 0): 1}


SERVING: dict[str, Any] = {
    "max_num_tokens": 8192,
    "splitting_ops": ("a::b",),
    "attention_support": "UNIFORM_SINGLE_TOKEN_DECODE",
}


def sizes(**settings: Any) -> dict[RuntimeMode, list[int]]:
    config = Config(**{**SERVING, **settings})
    plan = dispatch_plan(resolve_graph_mode(config).mode, config)
    found: dict[RuntimeMode, list[int]] = {FULL: [], PIECEWISE: []}
    for entry in reversed(plan.entries):
        found[entry.mode].append(entry.descriptor.num_tokens)
    return found


def test_default_sizes_above_512_serve_decode_only() -> None:
    found = sizes(max_num_reqs=2048)
    assert found[PIECEWISE][-1] == 512
    assert found[FULL][-2:] == [1024, 2048]
    assert sizes(max_num_reqs=2048, capture_sizes=(8, 1024))[PIECEWISE] == [8, 1024]


def test_the_sizes_follow_alignment_ceiling_and_interactive_use() -> None:
    assert all(size % 4 == 0 for size in sizes(size_alignment=4)[PIECEWISE])
    assert sizes(size_alignment=4, capture_sizes=(1, 6, 8))[PIECEWISE] == [4, 8]
    assert sizes(size_ceiling=64, max_num_reqs=512)[FULL][-1] == 64
    assert sizes(interactive_sizes=True)[FULL][:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_speculation_schedule_gives_tiers() -> None:
    schedule = (15,) * 16 + (1,) * 112
    found = sizes(
        speculation_schedule=schedule, max_num_reqs=128, attention_support="UNIFORM_BATCH"
    )
    assert {16 * 16, 2 * 128} <= {*found[FULL]}


def test_failure_10_w12_nothing_is_assumed_of_ops_that_declare_nothing() -> None:
    config = Config(max_num_tokens=64, splitting_ops=("a::b",))
    resolved = resolve_graph_mode(config)
    assert resolved.mode is GraphMode.PIECEWISE
    assert "attention_support is not set" in resolved.reasons[-1].why
    with pytest.raises(FullModeUnsupported, match="attention_support is not set"):
        resolve_graph_mode(config.changed(graph_mode="FULL"))
    breakable = Config(max_num_tokens=64, compile=False, graph_mode="FULL_AND_PIECEWISE")
    assert resolve_graph_mode(breakable).mode is GraphMode.PIECEWISE
    without_attention = Config(max_num_tokens=64)
    assert resolve_graph_mode(without_attention).mode is GraphMode.FULL_DECODE_ONLY
    assert resolve_graph_mode(without_attention.changed(graph_mode="FULL")).mode is GraphMode.FULL


def test_model_traits_limit_the_mode() -> None:
    config = Config(**SERVING, traits={"pooling": True})
    assert resolve_graph_mode(config).mode is GraphMode.PIECEWISE
    config = Config(**SERVING, traits={"encoder_decoder": True})
    assert resolve_graph_mode(config).mode is GraphMode.FULL_DECODE_ONLY
