"""The code of a model as a step runs it without a graph, bound to the weights in use."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.config import TOKENS
from ...compile.ir.plan import Plan, evaluated
from ...compile.plan.compiled_model import CompiledModel, Hooks
from ...compile.plan.result_forms import CheckedOps, checked_link, foreign_ops, is_checked
from ...errors import ModelClosed
from ..backends.protocol import Code, GraphBackend
from .binding import binder, fits, laid_out, lay_out, packer, passed_inputs
from .check import CheckStep
from .static_inputs import BoundInputs, StaticInputs, real_part


class ModelCode:
    """The code of one call form: `call` goes from the plan's inputs to its results.

    `inputs` are its static inputs. `fits` says whether a call has this form, `arguments` gives the
    plan's inputs of a call, and `pack` the model's result of the plan's results.

    The first time that it runs a number of tokens, forms of what splitting ops return are compared.
    """

    compiled: CompiledModel
    call: Code
    checks: tuple[CheckStep, ...]
    """What a step without a graph must satisfy."""

    def __init__(
        self, compiled: CompiledModel, inputs: StaticInputs, backend: GraphBackend
    ) -> None:
        self.inputs = inputs
        self._backend = backend
        self._hooks: Hooks | None = None
        plan = compiled.plan
        self._laid_out: Callable[..., bool] = (
            laid_out(plan) if compiled.traced else lambda *tensors: True
        )
        self.signature = inspect.signature(compiled.model.forward)
        self.arguments = binder(plan, self.signature)
        self.fits = fits(plan, self.signature)
        self.pack = packer(plan)
        self.passed = passed_inputs(plan)
        self.token_symbol = [symbol.label for symbol in plan.symbols].index(TOKENS)
        self.min_num_tokens = plan.symbols[self.token_symbol].low
        self.checks = ()
        self.bind(compiled)

    def bind(self, compiled: CompiledModel) -> None:
        """Use the weights that `compiled` is bound to."""
        self.compiled = compiled
        self.call = self._backend.link(compiled.link(self._hooks), compiled)
        self._checked: Code | None = None
        self._ran: Any = set() if is_checked(compiled.plan) else range(sys.maxsize)

    def link(self, hooks: Hooks | None) -> None:
        """Run each piece and each splitting op through what `hooks` give for a plan."""
        if hooks is not self._hooks:
            self._hooks = hooks
            self.bind(self.compiled)

    def run(self, tensors: tuple[Any, ...], num_tokens: int) -> tuple[Any, ...]:
        """Run one step. Inputs of other strides than compiled code relies on are copied."""
        call = self.call if num_tokens in self._ran else self._first_call(num_tokens)
        if self._laid_out(*tensors):
            return call(*tensors)
        inputs = self.compiled.plan.inputs
        copies = [lay_out(item, tensor) for item, tensor in zip(inputs, tensors, strict=True)]
        results = call(*copies)
        for item, tensor, copy in zip(inputs, tensors, copies, strict=True):
            if item.written and copy is not tensor:
                tensor.copy_(copy)
        return results

    def _first_call(self, num_tokens: int) -> Code:
        """The code for a number of tokens that has not run."""
        if self._checked is None:
            self._checked = self._backend.link(
                checked_link(self.compiled, self._hooks), self.compiled
            )
        checked = self._checked

        def first(*tensors: Any) -> tuple[Any, ...]:
            with nullcontext() if self._ran else CheckedOps(foreign_ops(self.compiled.plan)):
                results = checked(*tensors)
            self._ran.add(num_tokens)
            return results

        return first

    def run_padded(
        self, tensors: tuple[Any, ...], sizes: tuple[int, ...], padded: Mapping[str, int] = {}
    ) -> tuple[Any, ...]:
        """Run a step on inputs padded to given sizes, or to the fewest tokens that the code takes.

        Returns the real rows of the results.
        """
        inputs = self.padded(tensors, sizes, padded)
        position, dim = self.compiled.plan.token_source()
        num_tokens = inputs.views[position].shape[dim]
        call = self.call if num_tokens in self._ran else self._first_call(num_tokens)
        outputs = call(*inputs.views)
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
        self.call = self.arguments = _closed
        self.checks = ()
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


def _closed(*args: Any, **kwargs: Any) -> Any:
    raise ModelClosed()
