"""Faults to plant, one of each kind, and what bisect must say of each."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import _BACKENDS, _COMPILER_FNS
from torch._inductor import decomposition, lowering
from torch._inductor.virtualized import V

from piecegraph import Batch, Config, PreparedModel
from piecegraph.compile.backends import registry
from piecegraph.compile.ir.config import GraphPass
from piecegraph.compile.plan import plan_builder, split_model
from piecegraph.runtime.parts.proof import row_mixing
from piecegraph.tools.bisect import BisectCase, Step, bisect

from . import faulty_models as models

DUMP = 31
ATEN = torch.ops.aten


def decode(size):
    return Batch(size, size, is_decode=True, query_len=1)


def rows(size):
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(size))


@dataclass(frozen=True)
class Site:
    """Where a fault is planted: settings of the case, and patches that are undone afterwards."""

    settings: dict[str, Any]
    patch: pytest.MonkeyPatch

    def case(
        self,
        model=None,
        sizes=(8, 3),
        *,
        padding=models.Padding,
        dump=DUMP,
        **settings,
    ):
        """A case of an attention model with steps of given sizes."""
        buffer = torch.full((32,), DUMP)
        steps = [
            Step(
                (rows(size),),
                decode(size),
                models.Slots(buffer, tuple(reversed(range(size))), dump),
            )
            for size in sizes
        ]
        at = {} if "splitting" in str(settings) else {"splitting_ops": ("faulty::attention",)}
        config = self.config(**{**at, **settings})
        layers = {"layer": models.Layer(torch.zeros(32, 4))}
        return BisectCase(model or models.Tiny(), config, steps, layers, padding(buffer, DUMP))

    def one_step(self, model, op, metadata, captured):
        """A case of an op that reads the metadata, which is another at the capture."""
        config = self.config(
            splitting_ops=(op,), max_num_tokens=8, max_num_reqs=8, capture_sizes=(4,)
        )
        step = Step((rows(4),), decode(4), metadata)
        return BisectCase(model, config, [step], {}, captured)

    def whole(self, model, **settings):
        """A case of a model without a splitting op."""
        steps = [Step((rows(size),), decode(size)) for size in (8, 3, 8)]
        return BisectCase(model, self.config(**settings), steps)

    def compiler(self, function):
        """The name of a compiler, instead of that of the site."""
        self.patch.setitem(_BACKENDS, "of_the_fault", None)
        self.patch.setitem(_COMPILER_FNS, "of_the_fault", function)
        self.patch.setattr(function, "_tags", (), raising=False)
        return "of_the_fault"

    def config(self, **settings):
        base = {"inputs": {"x": "float32[num_tokens, 4]"}, "attention": {"support": 3}}
        limits = {"max_num_tokens": 32, "max_num_reqs": 16, "capture_sizes": (4, 8)}
        return Config(**{**base, **limits, **self.settings, **settings})

    def lower(self, op, fault):
        """Let Inductor lower `op` to what `fault(right, *args)` gives."""
        right = lowering.lowerings[op]
        self.patch.setitem(lowering.lowerings, op, lambda *args: fault(right, *args))

    def load(self, fault):
        """Let artifacts be loaded from the cache as `fault(right, artifacts)` gives."""
        right = registry.INDUCTOR
        faulty = replace(right, load=lambda artifacts: fault(right.load, artifacts))
        self.patch.setattr(registry, "INDUCTOR", faulty)


@dataclass(frozen=True)
class Fault:
    """What is planted, and what is to be found: `operator` None means that none may be named.

    With the stage None it is no fault.
    """

    what: str
    plant: Callable[[Site], BisectCase]
    stage: str | None
    operator: str | None = None
    piece: int | None = None
    graph_pass: str | None = None
    says: str = ""
    compiler: bool = False
    """Whether it is in Inductor or the cache, so that no other compiler has it."""

    def check(self, finding):
        """Raise AssertionError unless the finding names this fault and blames nothing else."""
        if self.stage is None:
            assert finding is None, finding
            return
        assert finding is not None, "no finding"
        line = finding.line()
        assert finding.stage == self.stage, line
        assert (finding.piece, finding.graph_pass) == (self.piece, self.graph_pass), line
        assert (finding.operator is None) == (self.operator is None), line
        assert (self.operator or "") in (finding.operator or ""), line
        assert self.says in line, line


def pass_in_one_range(site):
    small = GraphPass("small", models.sin_to_cos, max_num_tokens=4)
    return site.case(codegen={"passes": {"small": small}, "ranges": (4,)})


def pass_at_sizes_of_no_step(site):
    small = GraphPass("small", models.sin_to_cos, max_num_tokens=4)
    return site.case(codegen={"passes": {"small": small}, "ranges": (4,)}, sizes=(8,))


def lowered(op, other, *args):
    """Inductor takes one operator for another."""

    def plant(site):
        wrong = lowering.lowerings[other]
        site.lower(op, lambda right, x: wrong(x))
        return site.case(*args)

    return plant


def lowering_that_raises(site):
    def refuse(right, x):
        raise RuntimeError("no rule for relu")

    site.lower(ATEN.relu.default, refuse)
    return site.case()


def wrong_the_first_time(site):
    wrong, left = lowering.lowerings[ATEN.cos.default], [1]

    def once(right, x):
        first, left[0] = left[0] > 0, left[0] - 1
        return (wrong if first else right)(x)

    site.lower(ATEN.sin.default, once)
    return site.case()


def swapped_artifacts(site):
    def swapped(load, artifacts):
        loaded = list(load(artifacts))
        if len(loaded) == 4:
            loaded[1], loaded[2] = loaded[2], loaded[1]
        return loaded

    site.load(swapped)
    return site.case(models.Twice())


def wrong_only_when_loaded(site):
    def spoiled(load, artifacts):
        return [lambda args, fn=fn: tuple(r + 1 for r in fn(args)) for fn in load(artifacts)]

    site.load(spoiled)
    return site.case()


def wrong_in_the_whole_graph(site):
    def whole(right, x):
        nodes = V.graph.graph.nodes
        cut = any("attention" in str(node.target) for node in nodes)
        return lowering.add(right(x), 1) if cut else right(x)

    site.lower(ATEN.relu.default, whole)
    return site.case(codegen={"partition": "inductor"})


def equal_fingerprints(site):
    site.patch.setattr(split_model, "fingerprint", lambda graph, *_: str(len(graph.nodes)))
    return site.case(models.Twice())


def crossed_results(site):
    right = plan_builder.PlanBuilder.piece

    def crossed(self, index, piece):
        right(self, index, piece)
        step = self._steps[-1]
        self._steps[-1] = step.model_copy(update={"args": step.args[:1] + step.args[:0:-1]})

    site.patch.setattr(plan_builder.PlanBuilder, "piece", crossed)
    return site.case()


def rows_that_mix(model=None, **splitting):
    def plant(site):
        # `prepare` finds such a model and never pads it; without that its rows are wrong
        site.patch.setattr(row_mixing, "known_mixed_rows", lambda *_, **__: [])
        return site.case(model or models.MixedRows(), sizes=(4, 3), **splitting)

    return plant


def moved(move):
    """`move(case)` is called before a second step that a graph runs."""

    def plant(site):
        it = site.case(sizes=(4, 4))
        first, second = it.steps

        def metadata(decision):
            if decision.graph_index >= 0:
                move(it)
            return second.metadata(decision)

        return replace(it, steps=[first, replace(second, metadata=metadata)])

    return plant


def move_weight(it):
    it.model.before.weight.data = it.model.before.weight.data.clone()


def move_cache(it):
    it.layers["layer"].cache = it.layers["layer"].cache.clone()


def metadata_in_new_memory(site):
    capture = lambda descriptor, mode: models.Weights(torch.ones(32), 1.0)  # noqa: E731
    step = models.StepWeights(3.0, 1.0)
    return site.one_step(models.Scaling(), "faulty::scaled", step, capture)


def frozen_host_value(site):
    buffer = torch.ones(32)
    capture = lambda descriptor, mode: models.Weights(buffer.fill_(0), 1.0)  # noqa: E731
    step = models.StepWeights(3.0, 7.0, buffer)
    return site.one_step(models.Scaling(), "faulty::scaled", step, capture)


def spoiled_replay(site):
    run = PreparedModel.run

    def spoiled(self, decision, *args, **kwargs):
        result = run(self, decision, *args, **kwargs)
        if decision.mode.name == "FULL":
            result = result.clone()
            result[0, 0] += 1
        return result

    site.patch.setattr(PreparedModel, "run", spoiled)
    return site.case()


def wrong_silu(x):
    return x * torch.sigmoid(x * 1.01)


def decomposed_wrongly(site):
    right, wrong = decomposition.fast_random_decomps, {ATEN.silu.default: wrong_silu}
    site.patch.setattr(decomposition, "fast_random_decomps", lambda: {**right(), **wrong})
    return site.case(models.After(models.silu))


def lowered_wrongly(op, fault, *args, **settings):
    def plant(site):
        site.lower(op, fault)
        return site.case(*args, **settings)

    return plant


def spoiled_by(function, *args, **settings):
    """The fault is a compiler."""
    return lambda site: site.case(*args, compiler=site.compiler(function), **settings)


def lost_writes(site):
    return site.whole(models.Cached(), compiler=site.compiler(models.loses_writes))


def reading(site, field, step, captured):
    """A field of the metadata."""
    capture = lambda descriptor, mode: captured  # noqa: E731
    return site.one_step(models.Reading(field), "faulty::nested", step, capture)


def a_wider_table(site):
    memory = torch.ones(24)
    step, captured = (
        models.Nested(memory[: 8 * width].view(8, width), [1.0, 2.0], {"scale": 1.0})
        for width in (3, 2)
    )
    return reading(site, "table", step, captured)


def another_value(field):
    def plant(site):
        table = torch.ones(8, 2)
        captured, step = (
            models.Nested(table, [1.0, value], {"scale": value}) for value in (2.0, 7.0)
        )
        return reading(site, field, step, captured)

    return plant


def changed_before_a_step(model, change):
    """`change(model, number)` is called before each step, with its number."""

    def plant(site):
        it = site.case(model(), sizes=(4, 4, 4))

        def changing(number, metadata):
            def at_step(decision):
                change(it.model, number)
                return metadata(decision)

            return at_step

        steps = [replace(s, metadata=changing(n, s.metadata)) for n, s in enumerate(it.steps)]
        return replace(it, steps=steps)

    return plant


def set_factor(model, number):
    model.factor = 4.0 if number == 1 else 1.0


def set_gain(model, number):
    models.GAIN[0] = 4.0 if number == 1 else 1.0


def case(*args, **settings):
    """A fault that lies in the model or the settings of the case."""
    return lambda site: site.case(*args, **settings)


_LIVE = {"sizes": (4,) * 6, "padding": models.Clobbering}
_CLOBBERED = "right with all graphs captured at startup; a capture before this step changed layers"
_MIXED = "the model itself gives what the graph gives: its real rows depend on what padding holds"
FAULTS = [
    Fault("a pass of the user is wrong",
          case(codegen={"passes": {"sin_to_cos": models.sin_to_cos}}, sizes=(8,)),
          "compiler", "sin (faulty_models.py:", 0, "sin_to_cos",
          "right without the pass sin_to_cos", True),
    Fault("the second of two passes is wrong",
          case(codegen={"passes": {"harmless": models.harmless, "sin_to_cos": models.sin_to_cos}},
               sizes=(8,)), "compiler",
          "sin (faulty_models.py:", 0, "sin_to_cos", "right without the pass sin_to_cos", True),
    Fault("a pass is wrong in one range", pass_in_one_range, "compiler", "sin (faulty_models.py:",
          0, "small", "step=1 size=3", True),
    Fault("a pass is wrong at sizes of no step", pass_at_sizes_of_no_step, "compiler",
          "sin (faulty_models.py:", 0, "small", "no step has this size", True),
    Fault("Inductor lowers relu to abs", lowered(ATEN.relu.default, ATEN.abs.default), "compiler",
          "relu (faulty_models.py:", 1, compiler=True),
    Fault("Inductor cannot lower relu", lowering_that_raises, "compiler", None, 1,
          says="no rule for relu", compiler=True),
    Fault("Inductor is wrong the first time only", wrong_the_first_time, "compiler", None, 0,
          says="compiled by itself it is right", compiler=True),
    Fault("Inductor is wrong in the last layer only",
          lowered(ATEN.tanh.default, ATEN.sigmoid.default, models.Twice()), "compiler",
          "tanh (faulty_models.py:", 3, compiler=True),
    Fault("a custom op has other strides than its fake", case(models.WrongFake()), "compiler",
          None, 0, says="faulty.transposed", compiler=True),
    Fault("two artifacts in the cache are swapped", swapped_artifacts, "warm cache", None, 1,
          says="compiled again it is right: remove its artifact", compiler=True),
    Fault("code is wrong only when loaded", wrong_only_when_loaded, "warm cache", None, 0,
          says="compiled again it is right", compiler=True),
    Fault("Inductor is wrong in the whole graph only", wrong_in_the_whole_graph, "partitions",
          None, 0, compiler=True),
    Fault("different pieces have one fingerprint", equal_fingerprints, "dedupe", None, 1),
    Fault("results of a piece are passed on crossed", crossed_results, "traced graph"),
    Fault("a guard that does not hold is dropped",
          case(models.Branching(), tracing={"guards": "drop"}), "traced graph",
          "faulty_models.py:", says="'num_tokens': 8"),
    Fault("a guard cannot be proved", case(models.Branching()), "traced graph",
          says="GuardUnproved"),
    Fault("the model is random", case(models.Unsteady()), "eager", "aten::rand",
          says="another result the second time"),
    Fault("rows mix; split at named ops", rows_that_mix(splitting_ops=("faulty::attention",)),
          "PIECEWISE", "mean", 1, says=_MIXED),
    Fault("rows mix; split at a pattern", rows_that_mix(splitting_ops=("faulty::att*",)),
          "PIECEWISE", "mean", 1, says=_MIXED),
    Fault("rows mix; split by a predicate",
          rows_that_mix(splitting_ops=(models.split_at_attention,)), "PIECEWISE", "mean", 1,
          says=_MIXED),
    Fault("a padding row has a stale slot", case(dump=None, sizes=(4, 3)), "PIECEWISE",
          says="something of an earlier step is left"),
    Fault("a weight moves between two steps", moved(move_weight), "PIECEWISE",
          says="MovedTensor: before.weight moved"),
    Fault("the KV cache moves after the capture", moved(move_cache), "FULL",
          says="MovedTensor: layers['layer'].cache moved"),
    Fault("metadata is in new memory", metadata_in_new_memory, "FULL",
          says="MovedTensor: metadata.weights moved"),
    Fault("a FULL graph froze a host value", frozen_host_value, "FULL",
          says="metadata.scale of the forward context inside a graph, which keeps the value"),
    Fault("the replay of a FULL graph is wrong", spoiled_replay, "FULL",
          says="inside the FULL graph"),
    Fault("a DELAYED capture writes live state", case(**_LIVE, strategy="delayed"), "DELAYED",
          says=_CLOBBERED),
    Fault("a LAZY capture writes live state", case(**_LIVE, strategy="lazy"), "LAZY",
          says=_CLOBBERED),
    Fault("a decomposition is wrong", decomposed_wrongly, "compiler",
          "silu (faulty_models.py:", 1, compiler=True),
    Fault("Inductor reduces to the smallest", lowered_wrongly(
          ATEN.amax.default, lambda right, *args: lowering.lowerings[ATEN.amin.default](*args),
          models.After(models.largest)), "compiler", "amax (faulty_models.py:", 1, compiler=True),
    Fault("Inductor takes the other branch", lowered_wrongly(
          ATEN.where.self, lambda right, c, one, other: right(c, other, one),
          models.After(models.smaller)), "compiler", "where (faulty_models.py:", 1, compiler=True),
    Fault("a custom op has another dtype than its fake", case(models.After(models.wrong_type)),
          "compiler", "doubled_type (faulty_models.py:", 1,
          says="its result is torch.float64 (8, 4), and its fake says torch.float32",
          compiler=True),
    Fault("a custom op has another shape than its fake", case(models.After(models.wrong_shape)),
          "compiler", None, 1, says="first_columns", compiler=True),
    Fault("a pass exchanges two mutations",
          case(models.After(models.halves), codegen={"passes": {"swap": models.swapped_writes}}),
          "compiler", "divided", 1, "swap", "right without the pass swap", True),
    Fault("a pass computes in half precision",
          case(codegen={"passes": {"in_half": models.in_half}}), "compiler",
          "sin (faulty_models.py:", 0, "in_half", "right without the pass in_half", True),
    Fault("twelve residual layers in bfloat16",
          lambda site: site.whole(models.Residual()), None),
    Fault("a cancellation in bfloat16", lambda site: site.whole(models.Cancelled()), None),
    Fault("a mean of 4096 numbers", case(models.After(models.mean_of_many)), None),
    Fault("a compiler loses writes to a buffer", lost_writes, "compiler", "setitem", 0,
          says="step=0 size=8 first wrong: cache ["),
    Fault("a compiler exchanges two results", spoiled_by(models.crosses_results), "compiler",
          piece=0),
    Fault("a block table is wider than at the capture", a_wider_table, "FULL",
          says="metadata.table has another form after graphs were captured: float32[8, 2] with"),
    Fault("a FULL graph froze a value in a list", another_value("extra"), "FULL",
          says="metadata.extra[1] of the forward context inside a graph"),
    Fault("a FULL graph froze a value in a dict", another_value("by_name"), "FULL",
          says="metadata.by_name['scale'] of the forward context inside a graph"),
    Fault("what a hook reads changed", changed_before_a_step(models.Hooked, set_factor),
          "traced graph", says="`model.factor` was 1.0 at the trace and is 4.0"),
    Fault("a global changed", changed_before_a_step(models.Global, set_gain), "traced graph",
          says="GAIN"),
    Fault("an op in a piece reads how long the metadata is", case(models.Counted(), sizes=(3,)),
          "PIECEWISE", "faulty::counted", 0, says="it depends on how many rows there are, 4 or 3"),
    Fault("an op in a piece reads a number on the host", case(models.After(models.on_host)),
          "PIECEWISE", says="reads a tensor's value on the host inside a captured region (at"),
    Fault("the sum of all rows is taken off", rows_that_mix(
          model=models.After(models.without_the_sum), splitting_ops=("faulty::attention",)),
          "PIECEWISE", "sum", 1, says=_MIXED),
]  # fmt: skip


@contextlib.contextmanager
def site_for(compiler):
    """A site under Inductor with a cache of its own, or under another compiler without one."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        cached = compiler == "inductor"
        cache = {"cache": cached, "cache_dir": Path(folder) / "cache" if cached else None}
        yield Site({"compiler": compiler, **cache}, patch)


def find(fault, compiler, say=lambda _: None):
    with site_for(compiler) as site:
        return bisect(fault.plant(site), say=say)
