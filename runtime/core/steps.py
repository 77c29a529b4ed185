"""Dispatches and runs the steps of a prepared model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...compile.ir.config import TOKENS
from ...dispatch import (
    NO_GRAPH,
    Batch,
    BatchDescriptor,
    Decision,
    Dispatcher,
    Reason,
    RuntimeMode,
)
from ...errors import (
    AutocastActive,
    BatchInvalid,
    BatchMismatch,
    DecisionOfAnother,
    InvalidArgument,
    ModelClosed,
    StepInProgress,
)
from ...torch_compat.basics.tensors import (
    is_autocast_enabled,
    is_grad_enabled,
    set_grad_enabled,
    tree_map_only,
)
from ..backends.protocol import DeviceEvent, GraphBackend, Replay
from ..forward_context import CURRENT, ForwardContext
from .binding import Bind, binder, packer
from .check import CheckStep
from .code import ModelCode
from .usage import Usage


def nothing() -> None:
    """Do nothing."""


CORE_CHECKS = (
    "autocast is off",
    "forms and sizes of inputs, and fixed arguments",
    "tokens that the batch states",
    "the decision is one of this model",
    "no other step runs",
)
"""What `StepRunner.run` checks of every step itself, in order, before the checks of parts."""

GRAPH_CHECKS = ("sizes are those of the graph or less", "the engine's input buffers are in place")
"""What loading the inputs of a graph checks, after the checks of parts."""


class StepGraph(Protocol):
    """A captured graph as steps use it."""

    checks: tuple[CheckStep, ...]

    @property
    def runs_python(self) -> bool: ...
    @property
    def replay(self) -> Replay: ...
    def poison(self, overwrite: Callable[[Tensor], object]) -> None: ...


class StepRunner:
    """Dispatches and runs the steps of one prepared model. `use` says what they run."""

    code: ModelCode
    dispatcher: Dispatcher
    _graphs: Sequence[StepGraph | None]
    _bind: Bind

    def __init__(
        self, context: ForwardContext, usage: Usage, max_num_reqs: int, backend: GraphBackend
    ) -> None:
        self.context = context
        self.usage = usage
        self.running = False
        self.checks: tuple[CheckStep, ...] = ()
        """What a step without a graph must satisfy."""
        self.before_padding: Callable[[], None] = nothing
        """Called before a step is padded without a graph."""
        self.before: tuple[Callable[[Batch | None], None], ...] = ()
        """Called before a batch is dispatched. Empty while nothing waits for the time between two
        steps."""
        self.decided: tuple[Callable[..., bool], ...] = ()
        """Called after it; says whether it must be dispatched again."""
        self._max_num_reqs = max_num_reqs
        self._event = backend.event
        self._copied: DeviceEvent | None = None
        """Of the last step, once an engine has asked for it: an event costs a step time."""
        self._poison_result = backend.poison_result
        self._last_graph: StepGraph | None = None

    def use(
        self, code: ModelCode, dispatcher: Dispatcher, graphs: Sequence[StepGraph | None]
    ) -> None:
        """Run steps with `code` from now on, and with `graphs` by graph index."""
        plan = code.compiled.plan
        self.code = code
        self.dispatcher = dispatcher
        self._graphs = graphs
        self._signature = inspect.signature(code.compiled.model.forward)
        self._bind = binder(plan, self._signature)
        self._pack = packer(plan)
        self._token_symbol = [symbol.label for symbol in plan.symbols].index(TOKENS)
        self._min_num_tokens = plan.symbols[self._token_symbol].low

    def must_be_idle(self) -> None:
        """Raise StepInProgress inside a step."""
        if self.running:
            raise StepInProgress()

    def dispatch(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None,
        excluded_modes: Collection[RuntimeMode] | None,
    ) -> Decision:
        """See `PreparedModel.dispatch`."""
        if self.before:
            for before_step in self.before:
                before_step(batch)
        decision = self.dispatcher.dispatch(batch, allowed_modes, excluded_modes)
        if batch.num_reqs > self._max_num_reqs:
            raise BatchInvalid(batch=batch, fault=f"max_num_reqs is {self._max_num_reqs}")
        if self.decided:
            for decided in self.decided:
                if decided(batch, decision, allowed_modes, excluded_modes):
                    decision = self.dispatcher.dispatch(batch, allowed_modes, excluded_modes)
        return decision

    def run(
        self,
        decision: Decision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metadata: Any,
        stated: int | None,
    ) -> Any:
        """Run one step, see `PreparedModel.run`; `stated` are the tokens that its batch states,
        where that is known."""
        if is_autocast_enabled():
            raise AutocastActive(action="the step")
        try:
            tensors, sizes = self._bind(stated, *args, **kwargs)
        except TypeError as error:
            self._must_fit(args, kwargs, error)
            raise
        num_tokens = sizes[self._token_symbol]
        if stated is not None and stated != num_tokens:
            raise BatchMismatch(stated=stated, actual=num_tokens)
        graph = self._graph_of(decision)
        if graph is None and decision.graph_index != NO_GRAPH:
            descriptor = BatchDescriptor(num_tokens)
            decision = Decision(RuntimeMode.NONE, descriptor, NO_GRAPH, Reason.NOT_CAPTURED)
        if self.running:
            raise StepInProgress()
        context, before, with_grad = self.context, CURRENT.get(), is_grad_enabled()
        needs_context = graph is None or graph.runs_python
        try:
            self.running = True
            context.metadata = metadata
            context.decision = decision
            context.num_tokens = num_tokens
            for check in self.checks if graph is None else graph.checks:
                check(context, tensors)
            if needs_context:
                CURRENT.set(context)
            if with_grad:
                set_grad_enabled(False)
            results: Sequence[Any]
            copied = self._mark_copied if self._copied is not None else nothing
            if graph is None:
                copied()  # every input is read in place
                if num_tokens < self._min_num_tokens:
                    self.before_padding()
                    results = self.code.run_padded(tensors, sizes)
                else:
                    results = self.code.run(tensors, num_tokens)
            else:
                results = graph.replay(tensors, sizes, copied)
            self.running = False
            if needs_context:
                CURRENT.set(before)
            if with_grad:
                set_grad_enabled(True)
        except BaseException:  # also an interrupt between two of the lines above
            self.running = False
            CURRENT.set(before)
            set_grad_enabled(with_grad)
            raise
        self.usage.count(decision, num_tokens)
        if self._poison_result is not None:
            self._poison_old_results(graph, self._poison_result)
        return self._pack(results, tensors)

    def _must_fit(self, args: Any, kwargs: Any, error: TypeError) -> None:
        """Raise InvalidArgument for arguments that the model's forward does not take."""
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as reason:
            raise InvalidArgument(
                call="the prepared model",
                name="its inputs",
                value=f"arguments that do not fit: {reason}",
                expected=f"forward{self._signature}, and metadata= and batch= by name",
            ) from error

    def _graph_of(self, decision: Decision) -> StepGraph | None:
        """Raises DecisionOfAnother unless `decision` is one of this model."""
        try:
            graph_index = decision.graph_index
            if graph_index != NO_GRAPH:
                expected = self.dispatcher.plan.entries[graph_index].descriptor
                if decision.descriptor is not expected and decision.descriptor != expected:
                    raise DecisionOfAnother(decision=decision)
            return self._graphs[graph_index]
        except (AttributeError, IndexError):
            raise DecisionOfAnother(decision=decision) from None

    def reads_in_place(self, decision: Decision) -> frozenset[str]:
        """See `PreparedModel.reads_in_place`."""
        inputs, owned = self.code.compiled.plan.inputs, self.code.owned_inputs
        without_graph = self._graphs[decision.graph_index] is None
        return frozenset(
            each.label for each in inputs if without_graph or each.written or each.label in owned
        )

    def copied(self) -> DeviceEvent:
        """See `PreparedModel.copies_done`."""
        if self._copied is None:
            self._copied = self._event()
        return self._copied

    def _mark_copied(self) -> None:
        """The work so far has read all inputs that are copied."""
        self._copied = self._event()

    def padded_runs(
        self, padded: Mapping[str, int], args: tuple[Any, ...], kwargs: dict[str, Any], model: Any
    ) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The code, and the uncompiled `model`, on a step's inputs padded to given sizes, or to
        the lowest."""
        tensors, sizes = self._bind(None, *args, **kwargs)

        def code() -> Any:
            return self._pack(self.code.run_padded(tensors, sizes, padded), tensors)

        def uncompiled() -> Any:
            views = self.code.padded(tensors, sizes, padded).views
            by_input = {id(tensor): view for tensor, view in zip(tensors, views, strict=True)}
            padded_args, padded_kwargs = tree_map_only(
                torch.Tensor, lambda tensor: by_input.get(id(tensor), tensor), (args, kwargs)
            )
            return model(*padded_args, **padded_kwargs)

        return code, uncompiled

    def forget_results(self) -> None:
        """All graphs are freed: the results of the last one are not poisoned."""
        self._last_graph = None

    def close(self) -> None:
        """Steps raise ModelClosed from now on. All graphs were released."""
        self._bind = _refuse
        self.checks = ()
        self.before_padding = nothing
        self.context.layers = {}
        self.code.close()

    def _poison_old_results(
        self, graph: StepGraph | None, overwrite: Callable[[torch.Tensor], object]
    ) -> None:
        """Poison the results of the last graph, unless `graph` has just overwritten them."""
        if self._last_graph is not None and self._last_graph is not graph:
            self._last_graph.poison(overwrite)
        self._last_graph = graph


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ModelClosed()
