"""What a step must satisfy, so that its graph or its compiled code fits it.

Guarantee: a step whose weights, watched tensors, metadata, read values, host values or model differ
from what its graph was captured with, or whose inputs share memory with what the model writes to,
is an error that names the difference. Cost: see `prepared.checks()`; 1.9 us of a FULL step of
7.4, 6.1 of a PIECEWISE one of 50 (benchmarks/parts-cpu.json); without a graph 0.15 us for each
weight, whose forms are all compared. Switch: `PIECEGRAPH_OFF=checks`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ....compile.conditions.conditions import checked
from ....compile.conditions.places import reader
from ....compile.ir.serialization import dtype_name
from ....dispatch import PlanEntry, RuntimeMode
from ....torch_compat.basics.tensors import writes_counted
from ...capture.installed_graph import InstalledGraph
from ...capture.recorder import Kept
from ...core.check import Check, CheckStep
from ...core.code import ModelCode
from ...core.records import HostValues, UnwatchedTensors
from ...core_model import CoreModel
from ...part import Part
from ...tensors_by_path import tensors_by_path
from .address_checks import (
    CHECKED_PER_STEP,
    METADATA_PER_STEP,
    Addresses,
    HostValue,
    MetadataAddresses,
    Snapshot,
    with_expressions,
)
from .exchanged import BreakAccess, Exchanged, Facts, changes
from .model_check import MOST_S, ModelCheck
from .module_state import ModuleState, held_modules, modules_in
from .registrations import Registrations, register_again
from .shared_memory import memory_check, named_weights, own_weights, weights_in_reach
from .step_reads import ALL_EVERY, StepReads
from .weight_forms import WeightForms

IN_TURN = f"all at first and after a change, then {CHECKED_PER_STEP} in turn"
EACH_STEP = "all in each step, on the replay backend"
FORMS_SELDOM = f"all at first and in one step of {ALL_EVERY}"
METADATA_IN_TURN = f"all at first and in one step of {ALL_EVERY}, else {METADATA_PER_STEP} in turn"
MODEL_IN_TURN = f"a part in turn, at most {MOST_S * 1e6:.0f} us a step"


@dataclass(frozen=True, slots=True)
class _Relied:
    """What one graph relies on."""

    addresses: Snapshot
    metadata: MetadataAddresses | None
    reads: StepReads | None


class ChecksPart(Part):
    """The checks of the code in service and of its graphs."""

    name = "checks"
    offers: ClassVar = {"accept_changes": "accept_changes"}

    def __init__(self, core: CoreModel) -> None:
        self.addresses = Addresses(core.environment.backend.address)
        self._core = core
        self._registrations = Registrations(self._compare_all)
        self._code: ModelCode | None = None
        self._of_code: Snapshot = self.addresses.snapshot()
        self._bound: dict[str, Tensor] = {}
        """What the code is bound to, by each name: its graphs read these, and not what the model
        holds at a capture."""
        self._memory: dict[ModelCode, CheckStep | None] = {}
        self._forms: dict[ModelCode, WeightForms] = {}
        self._model: ModelCheck | None = None
        self._state: ModuleState
        self._accepted = set[str]()
        self._written = set[str]()
        self._kept = Kept()
        emit = core.environment.records.events.emit
        self._break_access = BreakAccess(partial(emit, "effect_dropped", level=logging.WARNING))
        self._of_model: Facts = {}
        self._graphs: dict[int, _Relied] = {}
        self._unwatched = set[int]()
        self._in_turn = not core.environment.backend.runs_python
        self._asked_for_all = False

    def compare_all(self) -> None:
        """Compare all addresses in each step from now on, as the replay backend does."""
        self._in_turn, self._asked_for_all = False, True
        self._core.checks_changed()

    def accept_changes(self) -> list[str]:
        """What the engine has changed of the model since `prepare` is its own from now on.

        Returns the changes, which an event names: at these places nothing is a ModelChanged any
        more. To be called by an engine that sets back what it set for the trace, before anybody
        else can change the model.
        """
        self._core.must_be_open()
        changes = self._model.accept() if self._model is not None else []
        self._bind(self._core.code)
        self._core.checks_changed()
        events = self._core.environment.records.events
        events.emit("model.changes_accepted", level=logging.INFO, changes=changes)
        return changes

    def checks(self, runs: InstalledGraph | ModelCode) -> list[Check]:
        checks = list[Check]()
        code, graph = (runs.code, runs) if isinstance(runs, InstalledGraph) else (runs, None)
        if (memory := self._memory.get(code)) is not None:
            checks.append(Check("inputs share no memory with what is written", memory))
        if self._model is not None:
            checks.append(Check("the model", self._model.check_step, MODEL_IN_TURN))
        if graph is None:
            # nothing is emulated where no graph is planned, and a replaced weight is told at once
            in_turn = not self._asked_for_all and not self._core.steps.dispatcher.plan.entries
            if (forms := self._forms.get(code)) is not None:
                checks.append(self._addresses("forms of weights", forms, FORMS_SELDOM, in_turn))
            name = "addresses of weights"
            return [*checks, self._addresses(name, self._of_code, IN_TURN, in_turn)]
        relied = self._graphs[graph.index]
        if relied.reads is not None:
            check = relied.reads.check if self._in_turn else relied.reads.check_all
            checks.append(Check("what Python read, by class and value", check))
        if relied.metadata is not None:
            name = "addresses of metadata and layers"
            checks.append(self._addresses(name, relied.metadata, METADATA_IN_TURN))
        name = "addresses of weights and watched tensors"
        if relied.addresses.values:
            name += ", values on the host"
        return [*checks, self._addresses(name, relied.addresses, IN_TURN)]

    def code_replaced(self, code: ModelCode) -> None:
        if code is not self._code:
            self._code = code
            self.addresses = Addresses(self.addresses.address)
            self._model = None
            self._accepted, self._written = set(), set()
            for name, tensor in self._core.watched().items():
                self.addresses.watch(name, tensor)
        self._bind(code)

    def watched(self, name: str) -> None:
        self.addresses.watch(name, self._core.watched()[name])

    def moved(self, graph: InstalledGraph | None) -> list[str]:
        if graph is None:
            return self._of_code.moved()
        relied = self._graphs[graph.index]
        layers = relied.metadata.moved(self._core.steps.context) if relied.metadata else []
        return relied.addresses.moved() + layers

    def refreshing(self) -> None:
        if self._model is not None:
            self._model.check()
        register_again(self._core.code.compiled.model)

    def notes(self, entry: PlanEntry) -> StepReads:
        compiled = self._core.code.compiled
        if compiled.traced:
            return StepReads(self._kept)
        return StepReads(self._kept, partial(Exchanged, compiled.model, self._break_access))

    def around_dummy_batch(self) -> None:
        """Raises ModelChanged before a capture or a warm-up reads a weight of another form."""
        for forms in self._forms.values():
            forms.check_all()

    @contextmanager
    def around_recording(self, entry: PlanEntry) -> Iterator[None]:
        """Of a model that is not traced, what it is now is compared later, except for what its
        forward changes itself. Raises ModelChanged."""
        compiled = self._core.code.compiled
        if compiled.traced:
            yield
            return
        if self._model is None:
            self._bind(self._core.code)  # modules that were added since are watched, too
            self._state = ModuleState(compiled.model, lambda: changes(self._of_model))
            self._model = ModelCheck(self._state.checked, self._accepted)
        else:
            self._model.check()
        before = _writes(compiled.model)
        try:
            yield
        finally:  # also what a capture that failed has left
            self._model.accept()
        now = _writes(compiled.model)
        written = {name for name, count in now.items() if count != before.get(name)}
        if not written <= self._written:
            self._written |= written
            self._find_shared()

    def captured(self, graph: InstalledGraph) -> None:
        recording, metadata = graph.recording, None
        reads: StepReads | None = recording.notes
        if reads is not None and reads.of_model:
            self._reach(reads.of_model)
        addresses = self.addresses.snapshot(bound=self._bound)
        noted, names = (reads.tensors, reads.names) if reads else ({}, {})
        addresses.values = self._host_values(graph)
        is_full, owned = graph.entry.mode is RuntimeMode.FULL, recording.ownership
        by_path = (with_expressions(recording.metadata) if is_full else {}) | noted
        found = {tensor.untyped_storage().data_ptr() for tensor in owned.found()}
        read = MetadataAddresses(by_path, found | owned.read, names)
        metadata = read or None
        if is_full:
            addressed = addresses.addresses() | {view.data_ptr() for view in graph.inputs.views}
            self._report_unwatched(graph, addressed | read.addresses())
        if reads is not None:
            reads.tensors, reads.of_model = {}, {}
        self._graphs[graph.index] = _Relied(addresses, metadata, reads or None)
        if not self._core.code.compiled.traced:
            self._core.checks_changed()

    def _reach(self, facts: Facts) -> None:
        """Compare what graphs read of other objects, and the modules that these hold."""
        self._of_model |= facts
        model = self._core.code.compiled.model
        known = {*model.modules(), *(module for *_, module in held_modules(model))}
        reached = dict[str, torch.nn.Module]()
        for path, obj, attribute, _ in facts.values():
            for at, steps, module in modules_in(getattr(obj, attribute, None), path, (attribute,)):
                if module in known:
                    continue
                known.add(module)
                reached[at] = module
                self._registrations.watch(module)
                for name, _ in named_weights(module):
                    read = reader("", (*steps, *name.split(".")), obj)
                    self.addresses.watch_read(f"{at}.{name}".removeprefix("model."), read)
        if reached:
            self._state.reach(reached)

    def freed(self, graph: InstalledGraph) -> None:
        self._graphs.pop(graph.index, None)
        if not self._graphs and not self._core.code.compiled.traced:
            self._model = None  # no graph is left: stop comparing the untraced model's state
            self._of_model = {}
            self._core.checks_changed()

    def close(self) -> None:
        self._registrations.close()
        self.addresses = Addresses(self.addresses.address)
        self._of_code = self.addresses.snapshot()
        self._code = self._model = None
        self._memory, self._bound, self._forms = {}, {}, {}

    def _addresses(
        self,
        name: str,
        places: Snapshot | MetadataAddresses | WeightForms,
        often: str,
        in_turn: bool = False,
    ) -> Check:
        if self._in_turn or in_turn:
            return Check(name, places.check_step, often)
        return Check(name, places.check_all, EACH_STEP)

    def _compare_all(self) -> None:
        """In the next step of each graph."""
        self.addresses.changes += 1

    def _bind(self, code: ModelCode) -> None:
        """Watch the weights that the code is bound to."""
        compiled, addresses = code.compiled, self.addresses
        placed = {each.target: each.place for each in compiled.plan.weights if each.place}
        for name, place in placed.items():
            addresses.watch_read(name, reader(*place, compiled.model))
        named = {name: each for name, each in compiled.weights.items() if name not in placed}
        bound = set(map(id, named.values()))
        # code that is not traced reads the model's weights itself, any of them
        named |= {
            name: weight
            for name, weight in named_weights(compiled.model)
            if id(weight) in bound or not compiled.traced
        }
        addresses.watch_module(compiled.model, named)
        self._registrations.watch(compiled.model)
        for path, steps, module in () if compiled.traced else held_modules(compiled.model):
            for name, _ in own_weights(module):
                read = reader("", (*steps, name), compiled.model)
                addresses.watch_read(f"{path}.{name}", read)
            self._registrations.watch(module)
        self._bound = {**compiled.weights, **named} if compiled.traced else {**compiled.weights}
        self._of_code = addresses.snapshot(self._bound, self._bound)
        self._find_shared()
        if compiled.conditions:
            relied = compiled.conditions, compiled.model
            everywhere = partial(checked, *relied, everywhere=True)
            self._model = ModelCheck(partial(checked, *relied), self._accepted, everywhere)

        # code that is not traced reads weights in any form
        traced = [each for each in self._core.steps.codes if each.compiled.weights]
        self._forms = {each: WeightForms(each.compiled) for each in traced}

    def _find_shared(self) -> None:
        codes = self._core.steps.codes
        self._memory = {code: memory_check(code.compiled, self._written) for code in codes}

    def _host_values(self, graph: InstalledGraph) -> tuple[HostValue, ...]:
        """Host tensors whose value was baked into the graph; on a CPU those that a move of the
        model to a device would leave on the host: attributes that are no buffers."""
        model, recording = self._core.code.compiled.model, graph.recording
        emulated = self._core.environment.backend.runs_python
        attributes = {
            value.data_ptr(): f"{path}.{name}".lstrip(".")
            for path, module in model.named_modules()
            for name, value in vars(module).items()
            if isinstance(value, Tensor)
        }
        names = {} if emulated else {t.data_ptr(): n for n, t in named_weights(model)}
        names |= attributes
        values = tuple(
            HostValue(
                names.get(tensor.data_ptr(), f"a {dtype_name(tensor.dtype)} tensor"), tensor, where
            )
            for tensor, where in recording.ownership.baked()
            if tensor.data_ptr() in names or not emulated
        )
        if values:
            host_values = HostValues(recording.name, [value.name for value in values])
            self._core.environment.records.add(host_values)
        return values

    def _report_unwatched(self, graph: InstalledGraph, addressed: set[int]) -> None:
        """Record once each tensor that a FULL graph reads and whose address no step checks."""
        recording = graph.recording
        unwatched = {
            place: tensor
            for tensor in recording.ownership.found()
            if addressed.isdisjoint(
                {tensor.data_ptr(), place := tensor.untyped_storage().data_ptr()}
            )
            and place not in self._unwatched
        }
        if unwatched:
            self._unwatched |= set(unwatched)
            layers = tensors_by_path("layers", dict(self._core.steps.context.layers))
            names = {t.untyped_storage().data_ptr(): path for path, t in layers}
            tensors = [
                f"{names.get(place, 'a tensor')}: {dtype_name(t.dtype)}{list(t.shape)}"
                for place, t in unwatched.items()
            ]
            self._core.environment.records.add(UnwatchedTensors(recording.name, tensors))


def _writes(model: torch.nn.Module) -> Mapping[str, int]:
    """How many writes torch has counted on each weight; it counts none on inference tensors."""
    named = weights_in_reach(model)
    return {name: writes_counted(tensor) for name, tensor in named if not tensor.is_inference()}
