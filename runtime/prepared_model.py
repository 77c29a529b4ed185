"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch

from ..cache import Cache
from ..compile.ir.config import TOKENS
from ..compile.lower.compiled_model import CompiledModel
from ..dispatch import (
    NO_GRAPH,
    Batch,
    BatchDescriptor,
    CaptureStrategy,
    Decision,
    Dispatcher,
    Reason,
    Refit,
    ResolvedMode,
    RuntimeMode,
    refit,
)
from ..errors import (
    AllCapturesFailed,
    AutocastActive,
    BatchInvalid,
    BatchMismatch,
    CaptureAfterSeal,
    GuardBroken,
    ModelClosed,
)
from ..torch_compat.tensors import is_autocast_enabled, is_grad_enabled, set_grad_enabled
from .backends.protocol import GraphBackend
from .background import Background
from .capture.captured_graphs import CapturedGraph, CapturedGraphs
from .capture.dummy_batch import MetadataFor
from .capture.profiler_ranges import StepRanges
from .capture.recording import Recording
from .config import BrokenGuard, Config
from .memory.ledger import MemoryLedger, MemoryPlan, opening_ledger, plan_memory
from .policy import capture_sizes, dispatch_plan
from .records import CaptureFailure, CaptureRecord, MemoryUse, Records, Switched
from .report import build_report
from .step.binding import Bind, binder, packer
from .step.forward_context import CURRENT, ForwardContext, forward_context
from .step.static_inputs import StaticInputs, allocate_inputs
from .step.step_log import ObservableSteps
from .step.usage import Usage
from .strategy.capturer import Capturer
from .strategy.monitors import Monitor, allow_compilation
from .strategy.ranks import Ranks, single_rank, start_facts
from .strategy.warmup import (
    AuxiliaryTask,
    WarmupPlan,
    WarmupProgress,
    capture_items,
    range_tasks,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """How batches are dispatched: the graph mode, with the reasons for it, and the dispatcher."""

    resolved: ResolvedMode
    dispatcher: Dispatcher


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


class PreparedModel(ObservableSteps):
    """A compiled model with its graphs. Made by `prepare`; not to be shared between threads.

    A step is `dispatch`, then `run` with metadata built for the decision's padded descriptor;
    calling the model does both. Results of a graph step are new tensors on static memory, which the
    next step overwrites: copy what must outlive the step.
    """

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
        self._monitor = Monitor(config.after_seal, self.records, self.backend, self._context)
        # a dropped model must not be watched for; the monitor does not refer to the model
        weakref.finalize(self, self._monitor.stop).atexit = False
        self._sealed = False
        self._closed = False
        self._sizes: tuple[int, ...] = ()
        """The capture sizes of the last refit."""
        self._stated: int | None = None
        """Tokens that the batch of the step in progress states, where it is known."""
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
        self._capturer = Capturer(*shared, self.records, self._graphs, self._exchange)
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
        self._stated = batch.num_tokens
        return self.run(decision, *args, metadata=made, **kwargs)

    def dispatch(
        self,
        batch: Batch,
        allowed_modes: Collection[RuntimeMode] | None = None,
        excluded_modes: Collection[RuntimeMode] | None = None,
    ) -> Decision:
        """Decide how to run `batch`. Under DELAYED and LAZY this may capture graphs.

        `allowed_modes` and `excluded_modes` hold for this step only; by default every mode may be
        used. `dispatcher.follow` applies another rank's decision, `dispatcher.set_costs` makes
        measured costs decide, `dispatcher.explain` lists the candidates.

        Raises BatchInvalid for a batch beyond `max_num_reqs` or with contradictory facts, and
        NoModeLeft if no allowed mode can serve it.
        """
        if batch.num_reqs > self.config.max_num_reqs:
            raise BatchInvalid(batch=batch, fault=f"max_num_reqs is {self.config.max_num_reqs}")
        decision = self.dispatcher.dispatch(batch, allowed_modes, excluded_modes)
        capturer = self._capturer
        if capturer.active:
            idle = capturer.idle_steps.get(id(decision))
            if idle is not None and batch.num_reqs >= idle.num_reqs:
                idle.steps += 1
            else:
                modes = allowed_modes, excluded_modes
                if self._behind is not None:
                    if self._switch_if_ready(self._behind, self._behind.background.poll()):
                        decision = self.dispatcher.decide(batch, *modes)
                    return decision
                if capturer.before_step(batch, decision, *modes):
                    decision = self.dispatcher.decide(batch, *modes)
                if not self._capturer.active and self.config.strategy is not CaptureStrategy.EAGER:
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
        if self._observers:
            with self._observing(self._context, decision, args, kwargs, metadata):
                return self.run(decision, *args, metadata=metadata, **kwargs)
        stated, self._stated = self._stated, None
        if is_autocast_enabled():
            raise AutocastActive(action="the step")
        try:
            tensors, sizes = self._bind(*args, **kwargs)
        except GuardBroken as broken:
            if self._eager is None:
                raise
            num_tokens = broken.facts["sizes"][self._token_symbol]
            return self._run_eagerly(decision, num_tokens, metadata, args, kwargs)
        num_tokens = sizes[self._token_symbol]
        if stated is not None and stated != num_tokens:
            raise BatchMismatch(stated=stated, actual=num_tokens)
        captured = self._captured[decision.graph_index]
        if decision.chunks and None in [self._captured[index] for index in decision.chunks]:
            captured = None
        if captured is None and decision.graph_index != NO_GRAPH:
            descriptor = BatchDescriptor(num_tokens)
            decision = Decision(RuntimeMode.NONE, descriptor, NO_GRAPH, Reason.NOT_CAPTURED)
        context = self._context
        context.metadata = metadata
        context.decision = decision
        context.num_tokens = num_tokens
        token = CURRENT.set(context)
        with_grad = is_grad_enabled()
        if with_grad:
            set_grad_enabled(False)
        try:
            results: Sequence[Any]
            if decision.chunks:
                results = self._graphs.run_chunks(decision.chunks, tensors, num_tokens)
            elif captured is None:
                if num_tokens < self._min_num_tokens:
                    self._find_form()
                    results = self._graphs.run_padded(tensors, sizes)
                else:
                    results = self._graphs.run(tensors)
            else:
                if captured.metadata is not None and not captured.metadata.check(metadata):
                    captured.metadata = None
                results = captured.replay(tensors, sizes)
        finally:
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
        context = self._context
        context.metadata, context.decision, context.num_tokens = metadata, decision, num_tokens
        with forward_context(context), torch.no_grad():
            results = self._eager(*args, **kwargs)
        self.events.count("eager_steps")
        self.usage.count_eager(num_tokens)
        return results

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """With `cold="serve"`: wait for the compiled code, and switch to it.

        Returns whether compiled code serves now: False after `timeout_s`, and where the model
        cannot be compiled, for which the report has the reason. With several ranks all must make
        the same call.
        """
        self._must_be_open()
        if self._behind is not None:
            self._switch_if_ready(self._behind, self._behind.background.wait(timeout_s))
        return self.compiled.traced

    def _switch_if_ready(self, behind: Behind, compiled: CompiledModel | None) -> bool:
        """Between two steps: serve `compiled`, if there is one, and capture by the strategy."""
        if compiled is not None or behind.background.over:
            self._stop_background()
            self._behind, self._capturer.active = None, False
        if compiled is None:
            return False
        with allow_compilation(), self.events.span("switch") as span:
            policy = behind.policy_of(compiled)
            if policy.dispatcher.plan.digest == self.dispatcher.plan.digest:
                policy = Policy(self.resolved, self.dispatcher)
            self.usage.follow(policy.dispatcher.plan)
            self._replace(compiled, policy)
            self._with_form = None
            if self._captures_after_switch:
                self._capturer.startup(serving=True)
        seconds, steps = behind.background.seconds, behind.background.steps
        self.records.add(Switched(seconds, steps, span.seconds * 1000))
        return True

    def capture(
        self,
        metadata_for: MetadataFor | None = None,
        *,
        progress: Callable[[CaptureRecord], None] | None = None,
    ) -> None:
        """Capture what the strategy wants at startup; later calls capture what is still missing.

        Without `metadata_for` the function given last is used, as in every method that captures.
        `progress` is called after each capture. A capture that fails is reported, and batches of
        its size run without a graph. While the model is served uncompiled nothing is captured:
        that follows when it switches to compiled code. Raises AllCapturesFailed if there is no
        graph after it, CaptureAfterSeal, and LayerMissing or MetadataFailed if a dummy batch lacks
        what ops need.
        """
        if self._sealed:
            raise CaptureAfterSeal(name="the startup set")
        self._make_ready(metadata_for)
        if self._ranks:
            self._ranks.agree("start", start_facts(self.config, self.dispatcher.plan))
        if self._behind is not None:
            self._captures_after_switch = True
            return
        before = len(self.records.of(CaptureFailure))
        with self.events.span("capture", level=logging.INFO):
            self._capturer.startup(progress)
        failures = self.records.of(CaptureFailure)[before:]
        if failures and not self.recordings():
            raise AllCapturesFailed(count=len(failures), reason=failures[0].reason)
        self.records.add(self._memory_use())

    def warm_up(
        self,
        metadata_for: MetadataFor | None = None,
        tasks: Sequence[AuxiliaryTask] = (),
        *,
        skip: Collection[str] = (),
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run each compiled range, capture as `capture` does, run the engine's `tasks`.

        `skip` names kinds of warm-up to leave out ("range", "capture", "auxiliary"); the cost of
        that is logged. `show` is called with a line of progress for each item. Raises
        InvalidSetting for an unknown kind, and what `capture` raises.
        """
        self._make_ready(metadata_for)
        plan = WarmupPlan(
            range_tasks(self.compiled.plan.symbols, self._graphs.run_dummy),
            capture_items(self._capturer.queue, self.dispatcher.plan),
            tasks,
            skip,
        )
        plan.run(self.capture, WarmupProgress(self.records, self.backend.memory, show))

    def memory_plan(
        self, utilization: float = 0.9, metadata_for: MetadataFor | None = None
    ) -> MemoryPlan:
        """Bytes left for the KV cache if the engine uses this share of the device.

        Before any capture, a few graphs are probed, with `metadata_for` where attention needs it,
        to forecast what all graphs take. With several ranks all must make the same call. Raises
        LayerMissing and MetadataFailed as `capture` does.
        """
        self._make_ready(metadata_for)
        self._find_form()
        graphs, margin = self._capturer.expected_bytes()
        ledger = self._stated_ledger()
        return plan_memory(self.backend.memory(), ledger, graphs, utilization, margin)

    def _make_ready(self, metadata_for: MetadataFor | None) -> None:
        """Before a capture or a warm-up: follow weights that were replaced since.

        Raises ModelClosed, and ModelMismatch for weights of another form.
        """
        self._must_be_open()
        if is_autocast_enabled():
            raise AutocastActive(action="the capture or warm-up")
        if self._graphs.unrecorded.moved():
            self._graphs.bind(self.compiled.rebound())
        if metadata_for is not None:
            self._graphs.metadata_for = metadata_for

    def _must_be_open(self) -> None:
        if self._closed:
            raise ModelClosed()

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, bound to the weights in use."""
        return self._graphs.compiled

    def capture_idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY still want; returns how many.

        For an engine that is idle. With several ranks all must make the same call. With
        `cold="serve"` it also switches to compiled code that is ready.
        """
        if self._behind is not None:
            self._switch_if_ready(self._behind, self._behind.background.poll())
        return 0 if self._behind is not None else self._capturer.idle(budget_ms)

    def refit(self, max_graphs: int | None = None) -> Refit:
        """Fit the capture sizes to the batches since the last refit, between two steps.

        Graphs of sizes that are dropped are freed at once; those of new ones are captured between
        the next steps, under every strategy and within its budgets. There are at most `max_graphs`
        sizes, by default as many as at the start. The sizes at the start are kept or come back if
        they do better on the newer half of the batches. With several ranks all must make the same
        call; they add up their batches.
        """
        self._must_be_open()
        default, histogram = (
            capture_sizes(self.resolved.mode, self.config),
            self.dispatcher.histogram,
        )
        if not default or histogram is None or self._behind is not None:
            return Refit((), (), (), 0.0, 0.0)
        older, newer = self._capturer.traffic(histogram, default[-1])
        sizes, most = self._sizes or default, max_graphs or len(default)
        change = refit(sizes, older, newer, default=default, max_graphs=most)
        histogram.clear()
        if change.add or change.drop:
            plan = dispatch_plan(self.resolved.mode, self.config, change.sizes)
            plan = plan.without_sizes_below(self._min_num_tokens)
            self.backend.synchronize()
            self._last_graph = None
            self._capturer.change_plan(set(plan.entries))
            self._graphs.extend()
            self.usage.extend(self.dispatcher.plan)
            self._sizes = change.sizes
        self.events.emit("refit", level=logging.INFO, add=change.add, drop=change.drop)
        return change

    def seal(self) -> None:
        """From now on nothing compiles, and only the strategy captures."""
        self._must_be_open()
        self._sealed = True
        self._monitor.start()
        self.events.emit("seal")

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Check in steps that a long-lived tensor (KV cache, workspace) stays at its address.

        This holds for graphs captured from now on; the tensor is not kept alive. If `name` is
        watched already, it refers to this tensor from now on, and graphs that read the previous
        one raise MovedTensor until `refresh`.
        """
        self._graphs.addresses.watch(name, tensor)

    def refresh(self) -> tuple[int, ...]:
        """Follow weights that were replaced and watched names that refer to another tensor.

        Graphs that read one are captured again, also after `seal`; their indices are returned.
        Updates in place need no refresh. Raises ModelMismatch for weights of another form. With
        several ranks all must make the same call.
        """
        self._must_be_open()
        stale, moved = self._graphs.stale(), self._graphs.unrecorded.moved()
        self._graphs.bind(self.compiled.rebound())
        self.events.emit("refresh", level=logging.INFO, stale=stale, moved=moved)
        self.backend.synchronize()
        self._capturer.recapture(list(stale))
        return tuple(stale)

    def profiler_ranges(self, on: bool = True) -> None:
        """Put steps, graphs, pieces and splitting ops into named ranges for profilers, or no more.

        Without them a step pays nothing for it. Ranges are those of `torch.profiler`.
        """
        self._must_be_open()
        self._graphs.set_ranges(on)
        self.unobserve(self._ranges)
        if on:
            self.observe(self._ranges)

    def release(self) -> None:
        """Free all graphs and their memory. Steps run without; `capture` captures again."""
        self.backend.synchronize()
        self._last_graph = None
        for graph_index, _ in self.recordings():
            self._graphs.remove(graph_index)
        self.ledger.state_pools(dict.fromkeys(self._capturer.memory.by_mode, 0))
        self._capturer.begin()
        self._capturer.active = self._behind is not None
        self._captures_after_switch = False
        self._monitor.stop()
        self._sealed = False

    def close(self) -> None:
        """Free graphs, buffers, code and weights; steps raise ModelClosed then. Idempotent."""
        if not self._closed:
            self.events.emit("dispatch", rows=self.usage.rows(), reasons=self.usage.reasons())
            self.release()
            if self._behind is not None:
                self._stop_background()
            self._behind = self._with_form = None
            self._closed = True
            self._bind = _refuse
            self._eager = self._last_graph = None
            self._context.layers = {}
            self._graphs.close()

    def report(self) -> dict[str, Any]:
        """What was prepared, captured and dispatched so far; see `runtime.report`."""
        return build_report(
            self.records,
            self.compiled.plan,
            self.resolved,
            self.usage,
            self._cache,
            self._stated_ledger(),
        )

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return self._graphs.recordings()

    def _stated_ledger(self) -> MemoryLedger:
        """The ledger, updated with what the graphs of each mode take now."""
        self.ledger.state_pools(self._capturer.memory.by_mode)
        return self.ledger

    def _memory_use(self) -> MemoryUse:
        """Bytes that recordings took when captured; bytes in use and free bytes now."""
        taken = sum(recording.bytes for _, recording in self.recordings())
        now = self.backend.memory()
        return MemoryUse(taken, now.used, now.free)


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise ModelClosed()
