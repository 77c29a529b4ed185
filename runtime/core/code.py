"""The code of a model as a step runs it without a graph, bound to the weights in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.plan import Plan, evaluated
from ...compile.plan.codegen import Hook
from ...compile.plan.compiled_model import CompiledModel
from ...errors import ModelClosed
from ..backends.protocol import Code, GraphBackend
from .binding import laid_out, lay_out
from .static_inputs import BoundInputs, StaticInputs, real_part

LinkHooks = Callable[[Plan], tuple[Hook, Hook]]
"""Those of `CompiledModel.link`."""


class ModelCode:
    """`call` is the code from the plan's inputs to its results. `inputs` are its static inputs."""

    __slots__ = ("_backend", "_hooks", "_laid_out", "call", "compiled", "inputs")

    compiled: CompiledModel
    call: Code

    def __init__(
        self, compiled: CompiledModel, inputs: StaticInputs, backend: GraphBackend
    ) -> None:
        self.inputs = inputs
        self._backend = backend
        self._hooks: LinkHooks | None = None
        self._laid_out = laid_out(compiled.plan) if compiled.traced else _any_layout
        self.bind(compiled)

    def bind(self, compiled: CompiledModel) -> None:
        """Use the weights that `compiled` is bound to."""
        self.compiled = compiled
        self.call = self._backend.link(compiled.link(self._hooks), compiled)

    def link(self, hooks: LinkHooks | None) -> None:
        """Run each piece and each splitting op through what `hooks` give for a plan."""
        self._hooks = hooks
        self.bind(self.compiled)

    @property
    def owned_inputs(self) -> frozenset[str]:
        """Names of the inputs that graphs read where the engine has them."""
        return frozenset(self.inputs.owned)

    def run(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        """Run one step. Inputs of other strides than compiled code relies on are copied."""
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

        Returns the real rows of the results.
        """
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
        inputs = self.inputs.at(padded or lowest)
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
        self.inputs.close()


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
