"""A wrong step again, from the state before it, in other ways: what differs is the cause.

Each way changes one thing. The step by its graph is the control: where that is right from the same
state, nothing that is changed can be said to make it right.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ... import Decision, ForwardContext, PreparedModel, forward_context
from ...torch_compat.basics.tensors import tree_map_only
from ..steps import Step
from .case import BisectCase, Wrong, first_wrong
from .culprit import first_wrong_count
from .observe import Ran, run_eagerly, run_model, run_observed, run_prepared, run_step
from .operations import OpTrace
from .state import ModelState, Moment


@dataclass(frozen=True, slots=True)
class Failure:
    """The first step that raised or is wrong, and what the model gives."""

    index: int
    wrong: Wrong | None
    right: Ran
    ran: Ran
    again: Callable[[], Ran]
    """Runs the uncompiled model again, up to the step."""


class Rerun:
    """The step of a failure, which `prepared` gave wrong."""

    def __init__(
        self, case: BisectCase, prepared: PreparedModel, state: ModelState, failure: Failure
    ) -> None:
        index, decision = failure.index, failure.ran.decision
        self._case = case
        self._prepared = prepared
        self._state = state
        self._failure = failure
        self._step = case.steps[index]
        self._decision = decision
        self.size, self.padded = self._step.batch.num_tokens, decision.descriptor.num_tokens
        before = replace(case, steps=case.steps[:index])
        state.restore()
        self._right_before = run_eagerly(before, state)
        self._restore()
        run_prepared(before, prepared, state, self._right_before)
        self._start = state.now()
        self.right = self._model()

    def is_right(self, ran: Ran) -> bool:
        """Whether a run does what the model does on the real rows from the same state."""
        return self._is_like(ran, self.right, self._model)

    def is_as_expected(self, ran: Ran) -> bool:
        """Whether a run does what the model does where it has run all steps before."""
        return self._is_like(ran, self._failure.right, self._failure.again)

    def _is_like(self, ran: Ran, want: Ran, again: Callable[[], Ran]) -> bool:
        tolerance = self._case.tolerance
        run = lambda: again().compared  # noqa: E731
        return ran.error is None and not first_wrong(want.compared, ran.compared, tolerance, run)

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

    def fresh_graph(self) -> Ran:
        """As decided, with metadata in memory that holds the padding of a capture."""
        return self.graph(partial(self._fresh, self._step))

    def operations(self) -> tuple[OpTrace, OpTrace]:
        """The operations of the model on the real rows, and on the padded inputs of the graph."""
        alone, padded = OpTrace(self._case.model), OpTrace(self._case.model)
        self._model(alone)
        self.padded_model(trace=padded)
        return alone, padded

    def wrong_state(self, ran: Ran) -> list[str]:
        """Names of what a run leaves other than the model does."""
        named = zip(self._start.names, self.right.state, ran.state, strict=True)
        return [name for name, want, have in named if first_wrong([want], [have])]

    def left_behind(self) -> str:
        """The earlier step that leaves the state so that this one is not as expected: it is, if
        that step runs as the model."""
        steps = range(len(self._right_before))
        if not steps or self._is_wrong_after(0)[0]:
            return ""
        blamed = first_wrong_count(len(steps), lambda n: self._is_wrong_after(n)[0]) - 1
        _, left = self._is_wrong_after(blamed + 1)
        _, by_model = self._is_wrong_after(blamed)
        names = ", ".join(name for name, _ in by_model.changed(left)) or "state"
        note = f"step {blamed} leaves {names} wrong: it is right if that step runs as the model"
        if self._case.capture_metadata is None:
            return note
        if self._is_wrong_after(len(steps), fresh=blamed)[0]:
            return note
        return (
            f"{note}, or if padding of its metadata is as at the capture: something of an earlier "
            "step is left there"
        )

    def _is_wrong_after(self, count: int, fresh: int | None = None) -> tuple[bool, Moment]:
        """Whether the step is wrong after `count` steps as prepared and the others as the model,
        one with `fresh` metadata; and the state before it."""
        self._restore()
        for number, (step, want) in enumerate(
            zip(self._case.steps, self._right_before, strict=False)
        ):
            if number >= count:
                run_model(self._case, step, self._state)
                continue
            decision = self._prepared.dispatch(step.batch)
            make = partial(self._fresh, step) if number == fresh else step.metadata_for
            run_step(self._prepared, step, decision, self._state, want.written, make)
        start, written = self._state.now(), self.right.written
        ran = run_step(self._prepared, self._step, self._decision, self._state, written)
        return not self.is_as_expected(ran), start

    def _restore(self) -> None:
        """The state as at first, and the memory of metadata as after the captures."""
        if self._case.capture_metadata is not None:
            for entry in self._prepared.dispatcher.plan.entries:
                self._case.capture_metadata(entry.descriptor, entry.mode)
        self._state.restore()

    def _fresh(self, step: Step, decision: Decision) -> Any:
        assert self._case.capture_metadata is not None
        self._case.capture_metadata(decision.descriptor, decision.mode)
        return step.metadata_for(decision)

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
