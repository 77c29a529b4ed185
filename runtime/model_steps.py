"""How a prepared model runs steps: with its compiled code, or uncompiled while that is made."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..cache import Cache
from ..compile.ir.config import TOKENS
from ..compile.plan.compiled_model import CompiledModel
from ..dispatch import (
    NO_GRAPH,
    Batch,
    BatchDescriptor,
    CaptureStrategy,
    Decision,
    Reason,
    RuntimeMode,
)
from ..errors import (
    AutocastActive,
    BatchInvalid,
    BatchMismatch,
    GuardBroken,
    ModelClosed,
    StepInProgress,
)
from ..torch_compat.basics.tensors import is_autocast_enabled, is_grad_enabled, set_grad_enabled
from .after_seal import Monitor, allow_compilation
from .backends.protocol import GraphBackend
from .background import Background
from .config import BrokenGuard, Config
from .graphs.capturer import Capturer
from .graphs.graph_set import CapturedGraphs
from .graphs.installed_graph import CapturedGraph
from .graphs.ledger import opening_ledger
from .graphs.profiler_ranges import StepRanges
from .policy import Policy
from .ranks import Ranks, single_rank
from .records import Records, Switched
from .steps.binding import Bind, binder, packer
from .steps.forward_context import CURRENT, ForwardContext, forward_context
from .steps.static_inputs import StaticInputs, allocate_inputs
from .steps.step_log import ObservableSteps
from .steps.usage import Usage


@dataclass(frozen=True, slots=True)
class Behind:
    """A model that is served uncompiled while `background` compiles it.

    `policy_of` gives the policy for its code. `with_form` is the uncompiled model with the form of
    its result, which only padding needs and which takes long to find.
    """

    background: Background
    policy_of: Callable[[CompiledModel], Policy]
    with_form: Callable[[], CompiledModel]


@dataclass(frozen=True, slots=True)
class Engine:
    """What the engine provides: `layers` for the forward context, input buffers of its own by
    input name, and the ranks that must start and capture the same way."""

    layers: Mapping[str, Any] = field(default_factory=dict)
    input_buffers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    ranks: Ranks | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """What the model runs on: graph backend, device, cache and records."""

    backend: GraphBackend
    device: torch.device
    cache: Cache
    records: Records


class ModelSteps(ObservableSteps):
    """The part of a prepared model that dispatches and runs its steps."""

    def __init__(
        self,
        compiled: CompiledModel,
        config: Config,
        policy: Policy,
        engine: Engine,
        services: Services,
        behind: Behind | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.backend = services.backend
        self.records = services.records
        self.events = services.records.events
        self._cache = services.cache
        self._device = services.device
        self._ranks = engine.ranks
        self._input_buffers = engine.input_buffers
        self._exchange = engine.ranks.exchange if engine.ranks else single_rank
        self._context = ForwardContext(engine.layers)
        self._max_num_reqs = config.max_num_reqs  # reading a pydantic field takes longer
        self._monitor = Monitor(config.after_seal, self.records, self.backend, self._context)
        # a dropped model must not be watched for; the monitor does not refer to the model
        weakref.finalize(self, self._monitor.stop).atexit = False
        self._sealed = False
        self._closed = False
        self._running = False
        options = getattr(self.backend, "options", None)
        self._poisons = bool(getattr(options, "poison_old_results", False))
        self._last_graph: CapturedGraph | None = None
        self._ranges = StepRanges()
        self.usage = Usage(policy.dispatcher.plan)
        self._behind = behind
        self._with_form = None if behind is None else behind.with_form
        self.ledger = opening_ledger(compiled, self._use(compiled, policy))
        self._captures_after_switch = False
        if behind is not None:
            self._stop_background = weakref.finalize(self, behind.background.stop)

    def _use(self, compiled: CompiledModel, policy: Policy) -> StaticInputs:
        """Run steps with `compiled`, so far without graphs; returns the static inputs."""
        forward = compiled.model.forward
        inputs = allocate_inputs(compiled, self.config, self._device, self._input_buffers)
        self.resolved = policy.resolved
        self.dispatcher = policy.dispatcher
        if self.step_log is not None:
            self.step_log.dispatcher = policy.dispatcher
        self._bind: Bind = binder(compiled.plan, inspect.signature(forward))
        self._pack = packer(compiled.plan)
        self._eager = forward if self.config.broken_guard is BrokenGuard.EAGER else None
        self._token_symbol = [symbol.label for symbol in compiled.plan.symbols].index(TOKENS)
        self._min_num_tokens = compiled.plan.symbols[self._token_symbol].low
        shared = self.config, policy.dispatcher, self.backend
        self._graphs = CapturedGraphs(compiled, *shared, inputs, self._context, self.records)
        self._captured = self._graphs.captured
        self._capturer = Capturer(
            *shared, self.records, self._graphs, self._exchange, self.usage.counts
        )
        self._capturer.active = (
            self._behind is not None
        )  # steps look whether compiled code is ready
        return inputs

    def _replace(self, compiled: CompiledModel, policy: Policy) -> None:
        """Run steps with `compiled` from now on; no graph was captured so far."""
        before = self._graphs
        self._use(compiled, policy)
        self._graphs.follow(before)

    def _find_form(self) -> None:
        """Find the form of the uncompiled model's result, if it is not known."""
        if self._with_form is not None:
            self._replace(self._with_form(), Policy(self.resolved, self.dispatcher))
            self._with_form = None

    def __call__(self, *args: Any, batch: Batch, metadata: Any = None, **kwargs: Any) -> Any:
        """Dispatch and run one step.

        Attention finds `metadata` in the forward context. It is an object, or a function of the
        decision that makes one, for metadata that must be padded to the descriptor.
        """
        decision = self.dispatch(batch)
        made = metadata(decision) if callable(metadata) else metadata
        if (behind := self._behind) is None:
            return self._step(decision, args, kwargs, made, batch.num_tokens)
        with behind.background.between_steps:
            return self._step(decision, args, kwargs, made, batch.num_tokens)

    def dispatch(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """Decide how to run `batch`. Under DELAYED and LAZY this may capture graphs.

        `allowed_modes` and `excluded_modes` hold for this step only; by default every mode may be
        used. `dispatcher.follow` applies another rank's decision, `dispatcher.explain` lists the
        candidates.

        Raises BatchInvalid for a batch beyond `max_num_reqs` or with contradictory facts, and
        NoModeLeft if no allowed mode can serve it.
        """
        if batch.num_reqs > self._max_num_reqs:
            raise BatchInvalid(batch=batch, fault=f"max_num_reqs is {self._max_num_reqs}")
        decision = self.dispatcher.dispatch(batch, allowed_modes, excluded_modes)
        capturer = self._capturer
        if capturer.active:
            if self._running:
                raise StepInProgress()
            idle = capturer.idle_steps.get(id(decision))
            if idle is not None and batch.num_reqs >= idle.num_reqs:
                idle.steps += 1
            else:
                modes = allowed_modes, excluded_modes
                behind = self._behind
                if behind is not None:
                    changed = self._poll(behind)
                else:
                    changed = capturer.before_step(batch, decision, *modes)
                if changed:
                    decision = self.dispatcher.decide(batch, *modes)
                lazily = self.config.strategy is not CaptureStrategy.EAGER
                if behind is None and lazily and not self._capturer.active:
                    self.seal()
        for observer in self._observers:
            observer.dispatched(batch, decision)
        return decision

    def run(self, decision: Decision, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Run one step as decided, on the real (unpadded) inputs.

        Raises InputMismatch, SizeOutOfRange or ArgumentFixed for wrong inputs, BatchExceeded for
        inputs larger than the decision's, and MovedTensor if a tensor that a graph reads was moved.
        A decision whose graph was freed since runs without a graph, and is counted so. Zero tokens
        are a step of padding alone: an idle rank makes one so that its collectives run. Raises
        AutocastActive under torch.autocast.
        """
        if (behind := self._behind) is None:
            return self._step(decision, args, kwargs, metadata, None)
        with behind.background.between_steps:
            return self._step(decision, args, kwargs, metadata, None)

    def _step(
        self,
        decision: Decision,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        metadata: Any,
        stated: int | None,
    ) -> Any:
        """Run one step; `stated` are the tokens that its batch states, where that is known."""
        if self._observers:
            with self._observing(self._context, decision, args, kwargs, metadata):
                return self._step(decision, args, kwargs, metadata, stated)
        if is_autocast_enabled():
            raise AutocastActive(action="the step")
        try:
            tensors, sizes = self._bind(stated, *args, **kwargs)
        except GuardBroken as broken:
            if self._eager is None:
                raise
            num_tokens = broken.facts["sizes"][self._token_symbol]
            return self._run_eagerly(decision, num_tokens, metadata, args, kwargs)
        num_tokens = sizes[self._token_symbol]
        if stated is not None and stated != num_tokens:
            raise BatchMismatch(stated=stated, actual=num_tokens)
        if self._graphs.memory_check is not None:
            self._graphs.memory_check(tensors)
        captured = self._captured[decision.graph_index]
        if captured is None and decision.graph_index != NO_GRAPH:
            descriptor = BatchDescriptor(num_tokens)
            decision = Decision(RuntimeMode.NONE, descriptor, NO_GRAPH, Reason.NOT_CAPTURED)
        if self._running:
            raise StepInProgress()
        self._running = True
        context, token = self._context, None
        context.metadata = metadata
        context.decision = decision
        context.num_tokens = num_tokens
        with_grad = is_grad_enabled()
        try:
            if captured is None or captured.runs_python:
                token = CURRENT.set(context)
            if with_grad:
                set_grad_enabled(False)
            results: Sequence[Any]
            if captured is None:
                if num_tokens < self._min_num_tokens:
                    self._find_form()
                    results = self._graphs.run_padded(tensors, sizes)
                else:
                    results = self._graphs.run(tensors)
            else:
                if captured.metadata is not None:
                    captured.metadata.check(metadata)
                results = captured.replay(tensors, sizes)
        finally:
            self._running = False
            if token is not None:
                CURRENT.reset(token)
            if with_grad:
                set_grad_enabled(True)
        self.usage.count(decision, num_tokens)
        if self._poisons:
            self._poison_old_results(captured)
        return self._pack(results, tensors)

    def _poison_old_results(self, captured: CapturedGraph | None) -> None:
        """Poison the results of the last graph, unless `captured` has just overwritten them."""
        if self._last_graph is not None and self._last_graph is not captured:
            self._last_graph.poison()
        self._last_graph = captured

    def _run_eagerly(
        self, decision: Decision, num_tokens: int, metadata: Any, args: Any, kwargs: Any
    ) -> Any:
        """Run the model itself, for sizes at which the compiled code would be wrong."""
        assert self._eager is not None
        if self._running:
            raise StepInProgress()
        self._running = True
        context = self._context
        context.metadata, context.decision, context.num_tokens = metadata, decision, num_tokens
        try:
            with forward_context(context), torch.no_grad():
                results = self._eager(*args, **kwargs)
        finally:
            self._running = False
        self.events.count("eager_steps")
        self.usage.count_eager(num_tokens)
        return results

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """With `cold="serve"`: wait for the compiled code, switch to it, and capture as at startup.

        Returns whether compiled code serves now: False after `timeout_s`, and where the model
        cannot be compiled, for which the report has the reason. Another thread may run steps
        meanwhile, unless there are several ranks: all must make the same call. Raises ModelClosed.
        """
        if (behind := self._behind) is not None:
            with behind.background.between_steps:
                self._must_be_open()
            compiled = behind.background.wait(timeout_s)
            with behind.background.between_steps:
                self._must_be_open()
                self._switch_if_ready(behind, compiled, waited=True)
        self._must_be_open()
        return self.compiled.traced

    def _poll(self, behind: Behind) -> bool:
        """Switch if compiled code is ready. Whether a step may be decided otherwise now."""
        with behind.background.between_steps:
            if self._behind is not behind:  # a thread that waits has switched
                return True
            return self._switch_if_ready(behind, behind.background.poll())

    def _switch_if_ready(
        self, behind: Behind, compiled: CompiledModel | None, *, waited: bool = False
    ) -> bool:
        """Between two steps: serve `compiled`, if there is one and no other thread has switched.

        The startup set is captured between the next steps, or now if the program has `waited`.
        """
        if self._behind is not behind or (compiled is None and not behind.background.over):
            return False
        self._stop_background()
        self._capturer.active = False
        try:
            if compiled is not None:
                self._switch(behind, compiled, waited)
        finally:
            self._behind = None  # from now on steps take no lock
        return compiled is not None

    def _switch(self, behind: Behind, compiled: CompiledModel, waited: bool) -> None:
        with allow_compilation(), self.events.span("switch") as span:
            policy = behind.policy_of(compiled)
            if policy.dispatcher.plan.digest == self.dispatcher.plan.digest:
                policy = Policy(self.resolved, self.dispatcher)
            self.usage.follow(policy.dispatcher.plan)
            self._replace(compiled, policy)
            self._capturer.active = False
            self._with_form = None
            if self._captures_after_switch and waited:
                self._capturer.startup(serving=True)
            elif self._captures_after_switch:
                self._capturer.startup_while_serving()
        seconds, steps = behind.background.seconds, behind.background.steps
        self.records.add(Switched(seconds, steps, span.seconds * 1000))

    def seal(self) -> None:
        """From now on nothing compiles, and only the strategy captures."""
        self._must_be_open()
        self._sealed = True
        self._monitor.start()
        self.events.emit("seal")

    def _must_be_open(self) -> None:
        if self._closed:
            raise ModelClosed()
        if self._running:
            raise StepInProgress()

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, bound to the weights in use."""
        return self._graphs.compiled
