"""A step that is run again, from the state before it, in any way that all ranks can."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....compile.guards.tolerance import compare, differences
from ....compile.held_values import HeldValues
from ....compile.ir.ops import tensors_in
from ....dispatch import NO_GRAPH, BatchDescriptor, Decision, Reason, RuntimeMode
from ....torch_compat.basics.tensors import (
    part_of_storage,
    storage_id,
    tree_leaves,
    tree_map_only,
)
from ...capture.dummy_batch import model_state
from ...core.preserved import SavedMemory
from ...core_model import CoreModel
from ...forward_context import ForwardContext, forward_context
from ...part import Run
from ...tensors_by_path import tensors_by_path
from .declared_writes import DeclaredWrites
from .lockstep import Lockstep, Way

MOST_STATE = 1 << 30
"""Bytes of state that a proof may keep. Steps that write more are skipped."""

MODEL, PADDED_MODEL, PADDED_CODE = "model", "padded model", "padded code"
"""Ways to run a step again: the model on the real rows, it or the code on padded ones. The others
are graphs by index, and NO_GRAPH."""

Keep = Callable[[Any, Decision], Any]


@dataclass
class KeptStep:
    """A step to run again: how it ran, its inputs, and the state before it."""

    decision: Decision
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    metadata: Any
    recorded: Any
    """Of the metadata, without its padding."""
    state: dict[str, Tensor]
    attributes: HeldValues
    """What Python objects held before the step."""
    before: SavedMemory
    after: SavedMemory
    waits: bool
    """Whether it is proved in idle time."""
    results: Any = None
    num_tokens: int = 0
    written: list[Tensor] | None = None
    """Elements of each tensor of `state` that the uncompiled model changes."""
    ranks: Lockstep | None = None


class StepRuns:
    """Keeps steps of one model and runs them again. `uncompiled` is the model as it was given to
    `prepare`; `keep` and `rebuild` are those of `prove_with`."""

    def __init__(self, core: CoreModel, uncompiled: Run) -> None:
        self.keep: Keep = as_it_is
        self.rebuild: Keep = as_it_is
        self._core = core
        self._steps = core.steps
        self._uncompiled = uncompiled

    def kept(
        self, decision: Decision, args: Any, kwargs: Any, metadata: Any, waits: bool, check: bool
    ) -> KeptStep:
        """A step that is about to run. Raises StateTooLarge. `check`: see `SavedMemory`."""
        recorded = self.keep(metadata, decision)
        if waits:
            args, kwargs = copied((args, dict(kwargs)))
            recorded = copy.deepcopy(recorded)
        pointers = tensors_in((args, kwargs))
        pointers += [tensor for _, tensor in tensors_by_path("metadata", metadata)]
        state = self.state(args, kwargs)
        before = SavedMemory(list(state.values()), pointers, check=check, most=MOST_STATE)
        held = self.held()
        return KeptStep(
            decision, args, kwargs, metadata, recorded, state, held, before, before, waits
        )

    def state(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """What a step may write, by name: each place once. Views of one memory are several."""
        compiled, context = self._steps.code_of(args, kwargs).compiled, self._steps.context
        written = [item.written for item in compiled.plan.inputs]
        inputs = tensors_in((args, kwargs))
        named = {
            **{f"state {n}": each for n, each in enumerate(model_state(compiled).values())},
            **dict(tensors_by_path("layers", context.layers)),
            **self._core.watched(),
        }
        if any(written):
            named |= {f"input {n}": tensor for n, tensor in enumerate(inputs)}
        places = {
            (storage_id(tensor), tensor.dtype, *part_of_storage(tensor)): (name, tensor)
            for name, tensor in named.items()
        }
        return dict(places.values())

    def held(self) -> HeldValues:
        """Attributes of the model and the layers."""
        layers = self._steps.context.layers.items()
        modules = dict(self._steps.code.compiled.model.named_modules())
        return HeldValues(modules | {f"layers[{name!r}]": each for name, each in layers})

    def difference(self, step: KeptStep, expected: Any, got: Any) -> Any:
        """How far a run is from the model beyond what rounding does; None if it is proved."""
        return compare(expected, got, lambda: self.again(step))

    def is_repeated(self, step: KeptStep, expected: Any) -> bool:
        """Whether another run of the model gives the same, bit for bit."""
        return not bool(differences(expected, self.again(step)).any())

    def again(self, step: KeptStep) -> Any:
        """The uncompiled model on the real rows."""
        return self.compared(step, *self.run(step, MODEL))

    def run(
        self, step: KeptStep, way: Way, start: SavedMemory | None = None, repairs: bool = False
    ) -> tuple[Any, SavedMemory, SavedMemory]:
        """What a run gives from a state, that before the step unless one is given, and the state
        around it. Other ranks make the same run. Python objects hold afterwards what they held
        before, unless the run repairs."""
        assert step.ranks is not None
        held = self.held()
        try:
            return step.ranks.run(  # type: ignore[no-any-return]
                way, lambda way: self.run_alone(step, way, start or step.before)
            )
        finally:
            if not repairs:
                held.restore()

    def run_alone(
        self, step: KeptStep, way: Way, start: SavedMemory
    ) -> tuple[Any, SavedMemory, SavedMemory]:
        decision, run = self._way(step, way)
        start.restore()
        step.attributes.restore()
        same = decision.descriptor == step.decision.descriptor and not step.waits
        metadata = step.metadata if same else self.rebuild(step.recorded, decision)
        before = step.before.now()  # with the metadata of this decision
        results = copied(run(metadata))
        return results, before, step.before.now()

    def _way(self, step: KeptStep, way: Way) -> tuple[Decision, Run]:
        """The decision of a run, and the run, which takes metadata."""
        if way == MODEL:
            decision, known = without_graph(step.num_tokens), [*step.state.values()]

            def model(metadata: Any) -> Any:
                with self._context(step, decision, metadata), DeclaredWrites(known):
                    return self._uncompiled(*step.args, **step.kwargs)

            return decision, model
        if way in (PADDED_CODE, PADDED_MODEL):
            sizes = self.padded_sizes(step.decision)
            args, kwargs = step.args, dict(step.kwargs)
            code, uncompiled = self._steps.padded_runs(sizes, args, kwargs, self._uncompiled)

            def padded(metadata: Any) -> Any:
                with self._context(step, step.decision, metadata):
                    return (code if way == PADDED_CODE else uncompiled)()

            return step.decision, padded
        assert isinstance(way, int)
        decision = without_graph(step.num_tokens) if way == NO_GRAPH else self._on_graph(way)

        def decided(metadata: Any) -> Any:
            return self._steps.run(decision, step.args, dict(step.kwargs), metadata, None)

        return decision, decided

    def compared(
        self, step: KeptStep, results: Any, before: SavedMemory, after: SavedMemory
    ) -> Any:
        """What is compared of two runs: the results, the written state, and whether a run wrote
        elsewhere. The first run that is compared is the uncompiled model's; it says what the
        written state is."""
        changed = before.changed(after)
        step.written = step.written or changed
        elsewhere = _but(changed, step.written)
        for start in (step.before, after):  # what is written may be what was there in one of them
            if any(map(torch.any, elsewhere)):
                _, unpadded, padded = self.run(step, PADDED_MODEL, start)
                elsewhere = _but(elsewhere, unpadded.changed(padded))
        return results, after.rows_of(step.written), any(map(torch.any, elsewhere))

    def is_right(self, step: KeptStep, way: Way, expected: Any) -> bool:
        """Whether a run from the state before the step does the same as far as is known; what
        raises does not."""
        try:
            results, before, after = self.run(step, way)
            got = self.compared(step, real_rows(results, expected[0]), before, after)
            difference = self.difference(step, expected, got)
            return difference is None or bool(difference.unknown)
        except Exception:
            return False

    def _on_graph(self, index: int) -> Decision:
        entry = self._steps.dispatcher.plan.entries[index]
        return Decision(entry.mode, entry.descriptor, index, Reason.EXCLUDED)

    def padded_sizes(self, decision: Decision) -> Mapping[str, int]:
        """Of the step's graph; empty if it ran without one."""
        return next((sizes for i, _, sizes in self.graphs() if i == decision.graph_index), {})

    def graphs(self, axes: Any = None) -> list[tuple[int, RuntimeMode, Mapping[str, int]]]:
        """Index, mode and sizes of each captured graph, or of those with these `axes`."""
        sizes = self._core.dummies.sizes
        return [
            (graph.index, graph.entry.mode, sizes(graph.index))
            for graph in self._core.graphs.present()
            if axes in (None, graph.entry.descriptor.axes)
        ]

    def _context(
        self, step: KeptStep, decision: Decision, metadata: Any
    ) -> AbstractContextManager[ForwardContext]:
        layers = self._steps.context.layers
        return forward_context(ForwardContext(layers, metadata, decision, step.num_tokens))


def as_it_is(metadata: Any, decision: Decision) -> Any:
    return metadata


def real_rows(results: Any, expected: Any) -> Any:
    """Results of padded inputs, cut to the shapes of those expected."""
    got, wanted = tree_leaves(results), tree_leaves(expected)
    if len(got) != len(wanted):
        return results
    return [
        one[tuple(slice(size) for size in other.shape)] if isinstance(one, Tensor) else one
        for one, other in zip(got, wanted, strict=True)
    ]


def copied(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


def _but(some: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return [one & ~other for one, other in zip(some, others, strict=True)]


def without_graph(num_tokens: int) -> Decision:
    return Decision(RuntimeMode.NONE, BatchDescriptor(num_tokens), NO_GRAPH, Reason.EXCLUDED)
