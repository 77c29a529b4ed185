"""Faults of engines and kernels, planted in a decoder with a paged cache: bisect names the cause of
each, and says nothing that is false. Controls, which are right, give no finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from piecegraph import Config, prepare
from piecegraph.tools.bisect import bisect

from .faulty_engine import HIDDEN, OWN, SCALES, SIZES, Decoder, Engine, changed_process, from_step

pytestmark = pytest.mark.compile

FALSE = ("earlier step", "padding", "how many rows", "moved", "graphs that read")
"""What a line may say only where it is true."""


def unchanged(model, x):
    return x


@dataclass(frozen=True)
class Fault:
    """`says` must be in the line, and of FALSE only what is in `true` or `says`. A control says
    nothing: it is right, and `how` has how it is run."""

    what: str
    says: tuple[str, ...] = ()
    change: Callable[[Engine, int], None] = lambda engine, step: None
    model: Callable[..., Any] = unchanged
    knobs: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    keeps_padding: tuple[str, ...] = ()
    true: str = ""
    how: dict[str, Any] = field(default_factory=dict)


def swap_experts(engine):
    first, second = EXPERTS[0], EXPERTS[1]
    engine.model.experts[:] = [second, first]


EXPERTS = []


def experts(model, x):
    return x + model.experts[0](x)


def own_experts(engine):
    EXPERTS[:] = EXPERTS or engine.model.experts
    engine.model.experts[:] = EXPERTS


def counted(model, x):
    model.seen.add_(x.new_ones(x.shape[0]).sum())
    return x + model.seen


def total(model, x):
    model.seen.copy_(x.abs().sum().reshape(1))
    return x


def strided(engine, filled, number):
    if number >= 3:
        rows = filled.table.clone()
        filled.table = engine.table.as_strided(rows.shape, (1, len(rows))).copy_(rows)
    return filled


def other_dtype(engine, filled, number):
    if number >= 3:
        filled.lens = filled.lens.view(torch.int32)[::2]
    return filled


def set_scale(value):
    return lambda engine: SCALES.__setitem__(0, value)


def in_order(engine):
    engine.layers["l0"].kv, engine.layers["l1"].kv = engine.kv(0), engine.kv(1)


def elsewhere(engine):
    if engine.number == 3:
        engine.kv(2).copy_(engine.kv(0))
    engine.layers["l0"].kv = engine.kv(2)


def assign_weight(value):
    def assign(engine):
        engine.model.down.weight.data = value

    return assign


WEIGHTS = torch.rand(2, HIDDEN, HIDDEN)


ROWS = "it depends on how many rows there are"
MIXED = "its real rows depend on what padding holds"
FAULTS = [
    Fault("metadata strides flipped at one address", ("metadata.table has another form",),
          knobs={"metadata": strided}, true="graphs that read"),
    Fault("metadata dtype flipped in place", ("metadata.lens has another form",),
          knobs={"metadata": other_dtype}, true="graphs that read"),
    Fault("an op scales by all rows", ("operator=engine::attend", MIXED), knobs={"scale": True}),
    Fault("a fast path of the model is wrong",
          ("operator=engine::attend", "the model itself", ROWS), knobs={"attend_wrong_at": 2}),
    Fault("a workspace that is never zeroed", ("stage=eager", "operator=engine::attend"),
          knobs={"workspace": True}),
    Fault("a kernel wrong at a captured size", ("operator=engine::norm", "piece=0", ROWS),
          knobs={"norm_wrong_at": 8}),
    Fault("a counter counts padding", ("piece=2", "writes seen otherwise", "aten::sum"),
          model=counted, true=ROWS),
    Fault("a LoRA scale in a list", ("stage=traced graph", "was 1.0 at the trace and is 2.0"),
          from_step(3, set_scale(2.0), set_scale(1.0)), lambda model, x: x * SCALES[0]),
    Fault("experts are swapped in a list", ("experts[0]", "call refresh() to follow it"),
          from_step(3, swap_experts, own_experts), experts, true="moved"),
    Fault("weight.data is assigned", ("down.weight moved", "call refresh() to follow it"),
          from_step(3, assign_weight(WEIGHTS[0]), assign_weight(WEIGHTS[1]))),
    Fault("a cache view at another offset", ("stage=FULL", "layers['l0'].kv"),
          from_step(3, elsewhere, in_order), true="moved graphs that read"),
    Fault("ids are padded with -1", ("steps.padding of input `ids`",),
          settings={"steps": {"padding": {"ids": -1}}}, true="padding"),
    Fault("the plain model raises", ("stage=eager", "step=3", "the model itself raised"),
          from_step(3, lambda engine: torch.set_default_dtype(torch.float64),
                    lambda engine: torch.set_default_dtype(torch.float32)),
          lambda model, x: torch.mm(x, torch.eye(HIDDEN))),
    # planted after the search was written
    Fault("a sum in a buffer has padding", ("writes seen otherwise", "aten::sum"), model=total,
          true=f"{MIXED} {ROWS}"),
    Fault("an op reads how many real tokens there are", ("num_tokens",),
          knobs={"counts_rows": True}),
]  # fmt: skip
QUICK = (
    "a counter counts padding", "the plain model raises", "a workspace that is never zeroed",
    "a fast path of the model is wrong",
)  # fmt: skip
"""Faults of every run of the tests. What padding leaves of an earlier step, and what else a trace
has read and is another now, is in planted_faults."""


def chosen(model, x):
    """Two rows of the head are nearly equal, so that rounding may decide."""
    scores = x @ torch.stack([x.new_ones(HIDDEN), x.new_ones(HIDDEN) * 1.0001]).T.to(x.dtype)
    return torch.cat([scores, model.down(x)], -1).argmax(-1)


def in_int8(model, x):
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-3) / 127
    return (x / scale).round().to(torch.int8).to(x.dtype) * scale


def in_float8(model, x):
    return x.to(torch.float8_e4m3fn).to(x.dtype)


def routed(model, x):
    """All experts have nearly the same score."""
    weight, expert = (1 + (x @ model.down.weight.T)[:, :2] * 1e-3).softmax(-1).max(-1)
    both = torch.stack([each(x) for each in model.experts], 1)
    return x + weight[:, None] * both[torch.arange(len(x)), expert]


def ordered(model, x):
    return x.sort(-1).values.cumsum(-1) + x.topk(2, -1).values.sum(-1, keepdim=True)


BFLOAT16 = {"dtype": torch.bfloat16}
INDUCTOR = {**BFLOAT16, "compiler": "inductor"}
CONTROLS = [
    Fault("a near tie", model=chosen, how=BFLOAT16),
    Fault("rounding to int8", model=in_int8, how=BFLOAT16),
    Fault("rounding to float8", model=in_float8, how=BFLOAT16),
    Fault("ties of a router", model=routed, how=BFLOAT16),
    Fault("sorts and sums", model=ordered, how=BFLOAT16),
    Fault("a near tie", model=chosen),
    Fault("sorts and sums", model=ordered),
    Fault("a near tie", model=chosen, how=INDUCTOR),
    Fault("rounding to int8", model=in_int8, how=INDUCTOR),
    Fault("ties of a router", model=routed, how=INDUCTOR),
    Fault("the engine"),
    Fault("the engine", how=BFLOAT16),
    # of this suite
    Fault("padding keeps the lengths of a larger step", keeps_padding=("lens",)),
    Fault("a buffer that real rows alone write", model=lambda model, x: x + model.seen.clone()),
]
"""With the steps of the engine that `test_the_engine_itself_is_proved` proves, the thirteen runs in
which the audit found no false alarm, and two more."""


def config_of(compiler, **settings):
    return Config(
        splitting_ops=("engine::attend",),
        inputs={"ids": "int64[num_tokens]", "positions": "int64[num_tokens]"},
        max_num_tokens=16, max_num_reqs=16, capture_sizes=(4, 8), compiler=compiler,
        attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, cache=False, **settings,
    )  # fmt: skip


def find(fault, monkeypatch, compiler="eager", dtype=torch.float32):
    # `prepare` never pads a model that mixes rows; these are to be padded
    found = "piecegraph.runtime.parts.proof.row_mixing.known_mixed_rows"
    monkeypatch.setattr(found, lambda *_, **__: [])
    EXPERTS.clear()
    with changed_process(**fault.knobs):
        model = Decoder(fault.model)
        for expert in model.experts:
            expert.requires_grad_(False).to(dtype)
        engine = Engine(model.to(dtype), fault.change, fault.keeps_padding)
        return bisect(engine.case(config_of(compiler, **fault.settings)))


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, id=f.what, marks=[pytest.mark.heavy] * (f.what not in QUICK)) for f in FAULTS],
)
def test_a_fault_of_an_engine(fault, monkeypatch):
    finding = find(fault, monkeypatch)
    line = finding.line()
    assert all(text in line for text in fault.says), line
    rest = line.replace("padded to", "")
    allowed = f"{fault.true} {' '.join(fault.says)}"
    assert not [text for text in FALSE if text in rest and text not in allowed], line


@pytest.mark.parametrize(
    "control",
    [
        pytest.param(
            c, id=f"{c.what} {' '.join(map(str, c.how.values()))}".strip(),
            marks=[pytest.mark.heavy] * bool(c.model is not unchanged or c.how),
        )
        for c in CONTROLS
    ],
)  # fmt: skip
def test_an_engine_that_is_right(control, monkeypatch):
    assert find(control, monkeypatch, **control.how) is None


def test_the_engine_itself_is_proved():
    """Each of its steps, in graphs of both kinds."""
    engine, shadow = Engine(Decoder()), {"every": 1, "share": 1.0}
    case = engine.case(config_of("eager", shadow=shadow), SIZES * 2)
    prepared = prepare(case.model, case.config, layers=case.layers)
    prepared.prove_with(
        lambda metadata, decision: (engine.size, engine.number % OWN),
        lambda kept, decision: engine.fill(decision.descriptor.num_tokens, *kept),
    )
    prepared.capture(case.capture_metadata)
    for step in case.steps:
        prepared(*step.args, batch=step.batch, metadata=step.metadata)
    facts = prepared.report()["shadow"]
    assert (facts["wrong"], facts["stopped"]) == ([], None)
    assert sum(row["count"] for row in facts["proved"]) == len(case.steps)
