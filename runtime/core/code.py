"""The code of a model as a step runs it without a graph, and the weights that it reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...compile.conditions.conditions import checked
from ...compile.conditions.places import reader
from ...compile.ir.plan import Plan, evaluated
from ...compile.plan.compiled_model import CompiledModel
from ...errors import ModelClosed
from ..backends.protocol import Code, GraphBackend
from ..parts.checks.address_checks import Addresses, Snapshot
from ..parts.checks.model_check import ModelCheck
from ..parts.checks.module_state import ModuleState
from ..parts.checks.shared_memory import memory_check
from ..parts.log.profiler_ranges import range_hooks
from .binding import laid_out, lay_out
from .static_inputs import BoundInputs, StaticInputs, real_part


class ModelCode:
    """Compiled code, bound to weights whose addresses are watched.

    `call` is the code from the plan's inputs to its results. `memory_check` is None if inputs
    cannot share memory with what the model writes to, `model_check` if neither compiled code
    nor a graph holds what the model is.
    """

    __slots__ = (
        "_accepted", "_backend", "_inputs", "_laid_out", "_relied_on", "_seen_written", "addresses",
        "call", "compiled", "memory_check", "model_check", "ranged",
    )  # fmt: skip

    compiled: CompiledModel
    call: Code
    memory_check: Callable[[tuple[Tensor, ...]], None] | None
    model_check: ModelCheck | None
    _relied_on: Snapshot

    def __init__(
        self, compiled: CompiledModel, inputs: StaticInputs, backend: GraphBackend
    ) -> None:
        self._backend = backend
        self.addresses = Addresses(backend.address)
        self.ranged = False
        self._inputs = inputs
        self._seen_written: set[str] = set()
        self._accepted = set[str]()
        self.model_check = None
        self._laid_out = laid_out(compiled.plan) if compiled.traced else _any_layout
        self.bind(compiled)

    def bind(self, compiled: CompiledModel) -> None:
        """Use and watch the weights that `compiled` is bound to."""
        self.compiled = compiled
        code = compiled.link(range_hooks if self.ranged else None)
        self.call = self._backend.link(code, compiled)
        placed = {each.target: each.place for each in compiled.plan.weights if each.place}
        for name, place in placed.items():
            self.addresses.watch_read(name, reader(*place, compiled.model))
        # code that is not traced reads the model's weights itself, any of them
        named = {name: each for name, each in compiled.weights.items() if name not in placed}
        self.addresses.watch_module(compiled.model, named if compiled.traced else None)
        self._relied_on = self.addresses.snapshot(compiled.weights)
        self.memory_check = memory_check(compiled, self._seen_written)
        if compiled.conditions:
            places = partial(checked, compiled.conditions, compiled.model)
            self.model_check = ModelCheck(places, self._accepted)

    @property
    def owned_inputs(self) -> frozenset[str]:
        """Names of the inputs that graphs read where the engine has them."""
        return frozenset(self._inputs.owned)

    def accept_changes(self) -> list[str]:
        """Check the places that are different now no more; returns the changes."""
        changes = self.model_check.accept() if self.model_check is not None else []
        self.bind(self.compiled)
        return changes

    @contextmanager
    def captured(self) -> Iterator[None]:
        """While a graph is captured: of a model that is not traced, what it is now is compared
        later, except for what its forward changes itself. Raises ModelChanged."""
        if not self.compiled.traced:
            if self.model_check is None:
                state = ModuleState(self.compiled.model)
                self.model_check = ModelCheck(state.checked, self._accepted)
            else:
                self.model_check.check()
        yield
        if self.model_check is not None and not self.compiled.traced:
            self.model_check.accept()

    def no_graphs(self) -> None:
        """No graph is left: what a model that is not traced was is of no account."""
        if not self.compiled.traced:
            self.model_check = None

    def set_ranges(self, on: bool) -> None:
        """Put pieces and splitting ops into ranges for profilers, or no longer."""
        self.ranged = on
        self.bind(self.compiled)

    def moved(self) -> list[str]:
        """Names of weights that were moved, freed or replaced."""
        return self._relied_on.moved()

    def note_written(self, names: Iterable[str]) -> None:
        """Refuse inputs that share memory with weights that code which is not traced wrote to."""
        written = set(names)
        if not written <= self._seen_written:
            self._seen_written |= written
            self.memory_check = memory_check(self.compiled, self._seen_written)

    def run(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run one step. Inputs of other strides than compiled code relies on are copied.

        Raises MovedTensor if a weight was moved.
        """
        self._relied_on.check_step()
        if self._laid_out(*tensors):
            return self.call(*tensors)
        inputs = self.compiled.plan.inputs
        copies = [lay_out(item, tensor) for item, tensor in zip(inputs, tensors, strict=True)]
        results = self.call(*copies)
        for item, tensor, copy in zip(inputs, tensors, copies, strict=True):
            if item.written and copy is not tensor:
                tensor.copy_(copy)
        return results

    def run_padded(
        self, tensors: tuple[Any, ...], sizes: tuple[int, ...], padded: Mapping[str, int] = {}
    ) -> tuple[Any, ...]:
        """Run a step on inputs padded to given sizes, or to the fewest tokens that the code takes.

        Returns the real rows of the results. Raises MovedTensor if a weight was moved.
        """
        self._relied_on.check_step()
        inputs = self.padded(tensors, sizes, padded)
        outputs = self.call(*inputs.views)
        if inputs.written:
            inputs.copy_back(tensors)
        results = real_results(self.compiled.plan, outputs, sizes)
        return tuple(result.clone() if inputs.holds(result) else result for result in results)

    def padded(
        self, tensors: tuple[Any, ...], sizes: tuple[int, ...], padded: Mapping[str, int]
    ) -> BoundInputs:
        """The static inputs of the `padded` sizes, or the lowest, filled with a step's."""
        symbols = self.compiled.plan.symbols
        lowest = {s.label: max(size, s.low) for s, size in zip(symbols, sizes, strict=True)}
        inputs = self._inputs.at(padded or lowest)
        inputs.loader(sizes)(tensors)
        return inputs

    def close(self) -> None:
        """Free code, weights and buffers; only the plan is left."""
        if self.compiled.sources:
            from ...torch_compat.tracing.sources import drop_sources

            drop_sources(self.compiled.sources)
        model = torch.nn.Module()
        self.compiled = replace(self.compiled, pieces=(), weights={}, model=model)
        self.call = _closed
        self.model_check = None
        self.addresses = Addresses(self.addresses.address)
        self._relied_on = self.addresses.snapshot()
        self._inputs.close()


def real_results(plan: Plan, outputs: Sequence[Any], sizes: Sequence[int]) -> tuple[Any, ...]:
    """Static outputs cut to the real `sizes`, which are in the order of the plan's symbols."""
    names = {symbol.name: size for symbol, size in zip(plan.symbols, sizes, strict=True)}

    return tuple(
        real_part(output, [evaluated(dim, names) for dim in result.shape])
        if isinstance(output, Tensor)
        else evaluated(result.name, names)
        for output, result in zip(outputs, plan.results, strict=True)
    )


def _closed(*args: Any) -> Any:
    raise ModelClosed()


def _any_layout(*tensors: Any) -> bool:
    return True
