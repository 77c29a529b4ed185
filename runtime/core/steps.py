"""Dispatches and runs the steps of a prepared model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...compile.ir.plan import dotted
from ...dispatch import (
    FORM,
    NO_GRAPH,
    Batch,
    BatchDescriptor,
    Decision,
    Dispatcher,
    Reason,
    RuntimeMode,
)
from ...errors import (
    BatchInvalid,
    BatchMismatch,
    CallFormUnknown,
    DecisionOfAnother,
    InvalidArgument,
    StepInProgress,
)
from ...torch_compat.basics.tensors import (
    is_grad_enabled,
    leaves_with_paths,
    set_grad_enabled,
    tree_map_only,
)
from ..backends.protocol import DeviceEvent, GraphBackend, Replay
from ..forward_context import CURRENT, ForwardContext
from .check import CheckStep
from .code import ModelCode
from .surroundings import must_be_plain
from .usage import Usage


def nothing() -> None:
    """Do nothing."""


CORE_CHECKS = (
    "autocast is off, and no mode of torch's is entered",
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
    def code(self) -> ModelCode: ...
    @property
    def runs_python(self) -> bool: ...
    @property
    def replay(self) -> Replay: ...
    def has_returned(self, tensor: Tensor) -> bool: ...
    def poison(self, overwrite: Callable[[Tensor], object]) -> None: ...


class StepRunner:
    """Dispatches and runs the steps of one prepared model. `use` says what they run."""

    codes: Sequence[ModelCode]
    """Of each call form."""
    has_forms: bool
    """Whether there are several."""
    dispatcher: Dispatcher
    _graphs: Sequence[StepGraph | None]

    def __init__(
        self, context: ForwardContext, usage: Usage, max_num_reqs: int, backend: GraphBackend
    ) -> None:
        self.context = context
        self.usage = usage
        self.running = False
        self.before_padding: Callable[[], None] = nothing
        """Called before a step is padded without a graph."""
        self.before: tuple[Callable[[Batch | None], None], ...] = ()
        """Called before a batch is dispatched. Empty while nothing waits for the time between two
        steps."""
        self.decided: tuple[Callable[..., bool], ...] = ()
        """Called after it; says whether it must be dispatched again."""
        self.own_decisions = False
        """Whether each dispatch gives a decision of its own, by which its step is known. Else the
        dispatcher gives one decision to equal batches."""
        self._max_num_reqs = max_num_reqs
        self._event = backend.event
        self._copied: DeviceEvent | None = None
        """Of the last step, once an engine has asked for it: an event costs a step time."""
        self._poison_result = backend.poison_result
        self._last_graph: StepGraph | None = None

    def use(
        self,
        codes: Sequence[ModelCode],
        dispatcher: Dispatcher,
        graphs: Sequence[StepGraph | None],
    ) -> None:
        """Run steps with `codes` from now on, and with `graphs` by graph index."""
        self.codes = codes
        self.code = codes[0]
        self.has_forms = len(codes) > 1
        self.dispatcher = dispatcher
        self._graphs = graphs

    def code_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCode:
        """The code of the form that a call has, by its skeleton; raises CallFormUnknown."""
        if not self.has_forms:
            return self.code
        for code in self.codes:
            if code.fits(*args, **kwargs):
                return code
        leaves = leaves_with_paths(self.code.signature.bind(*args, **kwargs).arguments)
        tensors = [dotted(path) for path, leaf in leaves if isinstance(leaf, Tensor)]
        shown = ", ".join(tensors) or "no tensors"
        raise self._no_form(f"has {shown}, which is none of the model's call forms")

    def _no_form(self, fault: str) -> CallFormUnknown:
        names = (", ".join(code.compiled.plan.tensors()) for code in self.codes)
        shown = [f"{number}: {each}" for number, each in enumerate(names)]
        return CallFormUnknown(fault=fault, forms="; ".join(shown))

    def stating_form(self, batch: Batch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
        """`batch` with the form of a call, of a model that has several."""
        form = self.codes.index(self.code_of(args, kwargs))
        return replace(batch, axes={**(batch.axes or {}), FORM: form})

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
        modes = allowed_modes, excluded_modes
        decision = self._decide(batch, *modes)
        if batch.num_reqs > self._max_num_reqs:
            fault = f"the setting max_num_reqs is {self._max_num_reqs}"
            raise BatchInvalid(batch=batch, fault=fault)
        if self.decided:
            for decided in self.decided:
                if decided(batch, decision, *modes):
                    decision = self._decide(batch, *modes)
        return decision

    def _decide(self, batch: Batch, *modes: Collection[RuntimeMode] | None) -> Decision:
        decision = self.dispatcher.dispatch(batch, *modes)
        return copy(decision) if self.own_decisions else decision

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
        must_be_plain("the step")
        try:
            code = self.code_of(args, kwargs) if self.has_forms else self.code
            tensors, sizes = code.arguments(stated, *args, **kwargs)
        except TypeError as error:
            self._must_fit(args, kwargs, error)
            raise
        num_tokens = sizes[code.token_symbol]
        if stated is not None and stated != num_tokens:
            raise BatchMismatch(stated=stated, actual=num_tokens)
        graph = self._graph_of(decision)
        if graph is not None and graph.code is not code:
            form, stated_form = self.codes.index(code), self.codes.index(graph.code)
            raise self._no_form(f"is of form {form}, and the batch states form {stated_form}")
        if graph is None and decision.graph_index != NO_GRAPH:
            descriptor = BatchDescriptor(num_tokens, axes=decision.descriptor.axes)
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
            for check in code.checks if graph is None else graph.checks:
                check(context, tensors)
            if needs_context:
                CURRENT.set(context)
            if with_grad:
                set_grad_enabled(False)
            results: Sequence[Any]
            returned = self._kept(tensors, code.passed) if code.passed else tensors
            copied = self._mark_copied if self._copied is not None else nothing
            if graph is None:
                copied()  # every input is read in place
                if num_tokens < code.min_num_tokens:
                    self.before_padding()
                    code = self.code_of(args, kwargs)  # it may be other code since
                    results = code.run_padded(tensors, sizes)
                else:
                    results = code.run(tensors, num_tokens)
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
        self._last_graph = graph
        return code.pack(results, returned)

    def _kept(self, tensors: tuple[Any, ...], passed: Collection[int]) -> tuple[Any, ...]:
        """The inputs, with a copy of each that is returned and is a result of the last step: this
        one may overwrite it."""
        last = self._last_graph
        return tuple(
            tensor.clone() if last and n in passed and last.has_returned(tensor) else tensor
            for n, tensor in enumerate(tensors)
        )

    def _must_fit(self, args: Any, kwargs: Any, error: TypeError) -> None:
        """Raise InvalidArgument for arguments that the model's forward does not take."""
        try:
            self.code.signature.bind(*args, **kwargs)
        except TypeError as reason:
            raise InvalidArgument(
                call="the prepared model",
                name="its inputs",
                value=f"arguments that do not fit: {reason}",
                expected=f"forward{self.code.signature}, and metadata= and batch= by name",
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
        graph = self._graphs[decision.graph_index]
        codes = self.codes if graph is None else [graph.code]
        return frozenset(
            each.label
            for code in codes
            for each in code.compiled.plan.inputs
            if graph is None or each.written or each.label in code.inputs.owned
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
        code = self.code_of(args, kwargs)
        tensors, sizes = code.arguments(None, *args, **kwargs)

        def compiled() -> Any:
            return code.pack(code.run_padded(tensors, sizes, padded), tensors)

        def uncompiled() -> Any:
            views = code.padded(tensors, sizes, padded).views
            by_input = {id(tensor): view for tensor, view in zip(tensors, views, strict=True)}
            padded_args, padded_kwargs = tree_map_only(
                torch.Tensor, lambda tensor: by_input.get(id(tensor), tensor), (args, kwargs)
            )
            return model(*padded_args, **padded_kwargs)

        return compiled, uncompiled

    def forget_results(self) -> None:
        """All graphs are freed: the results of the last one are not poisoned."""
        self._last_graph = None

    def close(self) -> None:
        """Steps raise ModelClosed from now on. All graphs were released."""
        self.before_padding = nothing
        self.context.layers = {}
        for code in self.codes:
            code.close()

    def _poison_old_results(
        self, graph: StepGraph | None, overwrite: Callable[[torch.Tensor], object]
    ) -> None:
        """Poison the results of the last graph, unless `graph` has just overwritten them."""
        if self._last_graph is not None and self._last_graph is not graph:
            self._last_graph.poison(overwrite)
