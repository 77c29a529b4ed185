"""A wrong step again, from the state before it, in other ways: what differs is the cause.

Each way changes one thing. The step by its graph is the control: where that is right from the same
state, nothing that is changed can be said to make it right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import Decision, ForwardContext, PreparedModel, forward_context
from ...torch_compat.basics.tensors import storage_id, tree_map_only
from .case import BisectCase, first_wrong
from .observe import Ran, run_eagerly, run_model, run_observed, run_prepared, run_step
from .operations import OpTrace, TracedOp
from .state import State


class Rerun:
    """Step `index` of a case, that `prepared` gave wrong under `decision`."""

    def __init__(
        self,
        case: BisectCase,
        prepared: PreparedModel,
        state: State,
        index: int,
        decision: Decision,
    ) -> None:
        self._case = case
        self._prepared = prepared
        self._state = state
        self._step = case.steps[index]
        self._decision = decision
        self.size, self.padded = self._step.batch.num_tokens, decision.descriptor.num_tokens
        before = replace(case, steps=case.steps[:index])
        state.restore()
        self._right_before = run_eagerly(before, state)
        self._model_start = state.now()
        state.restore()
        run_prepared(before, prepared, state, self._right_before)
        self._start = state.now()
        self.right = self._model()

    def is_right(self, ran: Ran, want: Ran | None = None) -> bool:
        """Whether a run does what the model does on the real rows from the same state."""
        if ran.error is not None:
            return False
        want = want or self.right
        model = lambda: self._model().compared  # noqa: E731
        return first_wrong(want.compared, ran.compared, self._case.tolerance, model) is None

    def graph(self, metadata_for: Callable[[Decision], Any] | None = None) -> Ran:
        """As decided."""
        self._start.restore()
        written = self.right.written
        return run_step(
            self._prepared, self._step, self._decision, self._state, written, metadata_for
        )

    def code(self) -> Ran:
        """The compiled code without a graph."""
        self._start.restore()
        decision = self._step.without_graph()
        return run_step(self._prepared, self._step, decision, self._state, self.right.written)

    def padded_code(self) -> Ran:
        """The compiled code on the padded inputs of the graph, without it."""
        return self._on_padding(lambda: self._padded_runs()[0]())

    def padded_model(
        self, fill: int | None = None, trace: AbstractContextManager[Any] | None = None
    ) -> Ran:
        """The uncompiled model on padded inputs: those of the graph, or with rows of `fill`."""
        if fill is None:
            return self._on_padding(lambda: self._padded_runs(trace)[1]())
        grown = partial(_with_rows, self.size, self.padded, fill)
        args, kwargs = tree_map_only(Tensor, grown, (self._step.args, dict(self._step.kwargs)))
        return self._on_padding(lambda: self._case.model(*args, **kwargs))

    def same_rows(self, one: Ran, other: Ran) -> bool:
        """Whether two runs give the same real rows, and write the same state."""
        cut = [
            tensor[tuple(map(slice, like.shape))]
            for tensor, like in zip(one.compared, self.right.compared, strict=False)
        ]
        return first_wrong(cut, other.compared, self._case.tolerance) is None

    def fresh_metadata(self, decision: Decision) -> Any:
        """The step's metadata in memory that holds the padding of a capture."""
        assert self._case.capture_metadata is not None
        self._case.capture_metadata(decision.descriptor, decision.mode)
        return self._step.metadata_for(decision)

    def operations(self) -> tuple[OpTrace, OpTrace]:
        """The operations of the model on the real rows, and on the padded inputs of the graph."""
        alone, padded = OpTrace(self._case.model), OpTrace(self._case.model)
        self._model(alone)
        self.padded_model(trace=padded)
        return alone, padded

    def name_of(self, op: TracedOp) -> str:
        """The tensor of the state that an operation writes; "" if it is none."""
        tensors = zip(self._start.tensors, self._start.names, strict=True)
        names = {storage_id(tensor): name for tensor, name in tensors}
        return next((names[memory] for memory in op.made if memory in names), "")

    def left_behind(self, right: Ran) -> str:
        """The state that is as the model leaves it nowhere else, and the step that left it wrong.

        It is shown by putting the model's there: the step then gives what it should.
        """
        causes = []
        tensors = zip(self._start.names, self._start.tensors, self._model_start.kept, strict=True)
        for name, tensor, kept in tensors:
            if tensor.shape != kept.shape or torch.equal(tensor, kept):
                continue

            def metadata_for(
                decision: Decision, tensor: Tensor = tensor, kept: Tensor = kept
            ) -> Any:
                tensor.copy_(kept)
                return self._step.metadata_for(decision)

            if self.is_right(self.graph(metadata_for), right):
                causes.append(f"an earlier step left {name} wrong: with the model's it is right")
        return "; ".join(causes)

    def _model(self, trace: OpTrace | None = None) -> Ran:
        self._start.restore()
        return run_model(self._case, self._step, self._state, trace)

    def _padded_runs(
        self, trace: AbstractContextManager[Any] | None = None
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        def model(*args: Any, **kwargs: Any) -> Any:
            with trace or nullcontext():
                return self._case.model(*args, **kwargs)

        core, step = self._prepared._core, self._step
        sizes = core.dummies.sizes(self._decision.graph_index)
        return core.steps.padded_runs(sizes, step.args, dict(step.kwargs), model)

    def _on_padding(self, run: Callable[[], Any]) -> Ran:
        def in_context(metadata: Any) -> Any:
            context = ForwardContext(self._case.layers, metadata, self._decision, self.size)
            with forward_context(context):
                return run()

        self._start.restore()
        make = self._step.metadata_for
        return run_observed(self._state, self._decision, make, in_context, self.right.written)


def _with_rows(size: int, padded: int, fill: int, value: Tensor) -> Tensor:
    """`value` with rows of `fill` up to `padded`, if it has `size` rows."""
    if not value.dim() or len(value) != size:
        return value
    return torch.cat((value, value.new_full((padded - size, *value.shape[1:]), fill)))
