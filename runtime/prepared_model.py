"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..cache import Cache
from ..compile.bundle.bundle import put_aside
from ..compile.eager_model import as_it_is
from ..compile.plan.compiled_model import CompiledModel
from ..config import BundleUse, Config, Shadow
from ..dispatch import Batch, Decision, Dispatcher, RuntimeMode
from ..errors import AutocastActive, CaptureAfterSeal, ModelClosed
from ..torch_compat.basics.tensors import is_autocast_enabled
from .after_seal import Monitor, allow_compilation
from .backends.protocol import Event, GraphBackend
from .bundle_failures import note_failure
from .gate import Gate
from .graphs.dummy_batch import MetadataFor
from .graphs.graphs import Graphs
from .graphs.ledger import MemoryLedger, MemoryPlan, opening_ledger, plan_memory
from .graphs.recording import Recording
from .graphs.warmup import AuxiliaryTask, capture_items, range_items, run_warmup
from .open_cache import cache_root
from .policy import Policy
from .ranks import Ranks, single_rank, start_facts
from .records import CaptureRecord, Records
from .report import build_report, verified
from .shadow import Cause, ShadowSteps, Stopped
from .shadow import Keep as MetadataOf
from .steps.code import ModelCode
from .steps.forward_context import ForwardContext
from .steps.profiler_ranges import StepRanges
from .steps.static_inputs import StaticInputs, allocate_inputs, split_buffers
from .steps.step_log import LoggedStep, StepLog, StepObserver
from .steps.steps import BetweenSteps, Steps, nothing
from .steps.usage import Usage
from .verification import Refusal, Verification, stale


class PreparedModel:
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
        backend: GraphBackend,
        device: torch.device,
        cache: Cache,
        records: Records,
        *,
        layers: Mapping[str, Any] | None = None,
        input_buffers: Mapping[str, torch.Tensor] | None = None,
        ranks: Ranks | None = None,
        gate: Gate | None = None,
        verification: Verification | None = None,
        without_bundle: Callable[[], tuple[CompiledModel, Gate]] | None = None,
        uncompiled: Callable[[], CompiledModel] | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.records = records
        note_failure = weakref.WeakMethod(self._note_failure)
        records.code_failed = lambda error: (note := note_failure()) and note(error)
        self.events = records.events
        self.resolved = policy.resolved
        self.usage = Usage(policy.dispatcher.plan)
        self._device = device
        self._cache = cache
        self._input_buffers = input_buffers or {}
        self._ranks = ranks
        self._closed = False
        self._ranges = StepRanges()
        self._gate = gate
        self._refusal: Refusal | None = None
        context = ForwardContext(layers or {})
        options = getattr(self.backend, "options", None)
        self._steps = Steps(
            context,
            self.usage,
            config.max_num_reqs,
            poisons=bool(getattr(options, "poison_old_results", False)),
        )
        self._uncompiled = uncompiled
        self._shadow: ShadowSteps | None = None
        if config.shadow is not None:
            self._shadow = self._proving(config.shadow, as_it_is(compiled.model))
        self._run = self._proved(self._steps.run)
        self._monitor = Monitor(config.steps.after_seal, self.records, self.backend, context)
        # a dropped model must not be watched for; the monitor does not refer to the model
        weakref.finalize(self, self._monitor.stop).atexit = False
        self.ledger = opening_ledger(compiled, self._use(compiled, policy.dispatcher))
        if gate is not None:
            self._stand_behind(gate)
        self._verification = verification
        self._without_bundle = without_bundle
        if verification is not None:
            verification.start(self._bundle_refused)
            weakref.finalize(self, verification.stop)

    def __call__(self, *args: Any, batch: Batch, metadata: Any = None, **kwargs: Any) -> Any:
        """Dispatch and run one step.

        Attention finds `metadata` in the forward context. It is an object, or a function of the
        decision that makes one, for metadata that must be padded to the descriptor.
        """
        decision = self._steps.dispatch(batch, None, None)
        if callable(metadata):
            metadata = metadata(decision)
        try:
            return self._run(decision, args, kwargs, metadata, batch.num_tokens)
        except Exception as error:
            self._note_failure(error)
            raise

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
        return self._steps.dispatch(batch, allowed_modes, excluded_modes)

    def run(self, decision: Decision, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Run one step as decided, on the real (unpadded) inputs.

        Raises InputMismatch, SizeOutOfRange or ArgumentFixed for wrong inputs, BatchExceeded for
        inputs larger than the decision's, and MovedTensor if a tensor that a graph reads was moved.
        A decision whose graph was freed since runs without a graph, and is counted so. Zero tokens
        are a step of padding alone: an idle rank makes one so that its collectives run. Raises
        AutocastActive under torch.autocast.
        """
        try:
            return self._run(decision, args, kwargs, metadata, None)
        except Exception as error:
            self._note_failure(error)
            raise

    def reads_done(self) -> Event:
        """The point at which the steps so far have read all that they read.

        After `synchronize()` of it on the host, or `wait()` for a stream that writes, everything
        that these steps read may be rewritten. Calls it has of `torch.cuda.Event`, which it is on a
        device; see `reads_in_place` for what may be rewritten earlier.
        """
        return self.backend.event()

    def reads_in_place(self, decision: Decision) -> frozenset[str]:
        """Names of the inputs that a step of this decision reads where the engine has them.

        Other inputs are copied first, in the order of the stream, and free after their copy.
        Metadata and layers are read in place by every step.
        """
        return self._steps.reads_in_place(decision)

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
        if self._monitor.started:
            raise CaptureAfterSeal(name="the startup set")
        self._make_ready(metadata_for)
        if self._ranks:
            self._ranks.agree("start", start_facts(self.config, self.dispatcher.plan))
        if self._gate is not None:
            self._gate.captures = True
            return
        self._graphs.startup(progress)
        if self._verification is not None:
            self._verification.ready()

    def warm_up(
        self,
        metadata_for: MetadataFor | None = None,
        tasks: Sequence[AuxiliaryTask] = (),
        *,
        skip: Collection[str] = (),
        show: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run each compiled range, capture as `capture` does, run the engine's `tasks`.

        A model that is served uncompiled has no ranges, and is captured when it switches.
        `skip` names kinds of warm-up to leave out ("range", "capture", "auxiliary"); the cost of
        that is logged. `show` is called with a line of progress for each item. Raises
        InvalidSetting for an unknown kind, and what `capture` raises.
        """
        self._make_ready(metadata_for)
        items = [item for task in tasks for item in task.items()]
        if self._gate is None:
            captures = capture_items(self._graphs.capturer.queue, self.dispatcher.plan)
            ranges = range_items(self.compiled.plan.symbols, self._graphs.dummies.run)
            items = [*ranges, *captures, *items]
        run_warmup(items, self.capture, skip, self.records, self.backend.memory, show)

    def memory_plan(
        self, utilization: float = 0.9, metadata_for: MetadataFor | None = None
    ) -> MemoryPlan:
        """Bytes left for the KV cache if the engine uses this share of the device.

        Before any capture, a few graphs are probed, with `metadata_for` where attention needs it,
        to forecast what all graphs take, and the largest step runs twice without a graph. What a
        cold start has left in torch's cache is given back first, so that the plan is that of a warm
        one. With several ranks all must make the same call. Raises LayerMissing and MetadataFailed
        as `capture` does.
        """
        self._make_ready(metadata_for)
        if self._gate is not None:
            self._gate.find_form()
        graphs, margin = self._graphs.capturer.limit.expected_bytes()
        largest_step = self._graphs.largest_step()
        memory, ledger = self.backend.memory(), self._stated_ledger()
        return plan_memory(memory, ledger, graphs, utilization, margin, largest_step)

    def capture_idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY still want; returns how many.

        For an engine that is idle. With several ranks all must make the same call. With
        `bundle="serve"` it also switches to compiled code that is ready.
        """
        if self._gate is not None:
            self._gate.poll()
        return 0 if self._gate is not None else self._graphs.capturer.idle(budget_ms)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """With `bundle="serve"`: wait for compiled code, switch to it, and capture as at startup.

        Returns whether compiled code serves now: False after `timeout_s`, and where the model
        cannot be compiled, for which the report has the reason. Another thread may run steps
        meanwhile, unless there are several ranks: all must make the same call. Raises ModelClosed.
        """
        if self._gate is not None:
            self._gate.wait(timeout_s, self._must_be_open)
        if self._closed:
            raise ModelClosed()
        return self.compiled.traced

    def wait_until_verified(self, timeout_s: float | None = None) -> bool | str:
        """Wait until the bundle of this start is compared with a new trace of the model.

        Returns what `report()["cache"]["verified"]` states: whether it is the model's, or why that
        is not known, as after `timeout_s`. After a difference the next step runs the model
        uncompiled, until it is compiled again. Raises BundleStale with `bundle="force"`.
        """
        if self._verification is not None:
            self._verification.join(timeout_s)
            if self._verification.difference is not None:
                self._must_not_be_forced()
        return verified(self.records)

    def shadow_idle(self) -> bool:
        """Prove the step that waits for it, for an engine that is idle; whether there was one.

        From the first call on, steps that are due under `Config(shadow=...)` are kept instead of
        proved at once: copies of inputs, metadata and results, and of the rows of state to which
        inputs and metadata point. Until this is called, the engine may run steps and write rows.
        It must not change weights in place, nor other state that the step has read.
        """
        self._must_be_open()
        return self._shadow is not None and self._shadow.idle()

    def prove_with(self, keep: MetadataOf, rebuild: MetadataOf) -> None:
        """How to run a step again if metadata is padded to a step's descriptor.

        `keep(metadata, decision)` gives a copy of a step's metadata without padding, and
        `rebuild(kept, decision)` that for another decision: its descriptor states the tokens.
        Without them the metadata of a step is used as it is.
        """
        if self._shadow is not None:
            self._shadow.keep, self._shadow.rebuild = keep, rebuild

    def seal(self) -> None:
        """From now on nothing compiles, and only the strategy captures."""
        self._must_be_open()
        self._graphs.regions.store()
        self._monitor.start()

    def accept_changes(self) -> list[str]:
        """What the engine has changed of the model since `prepare` is its own from now on.

        Returns the changes, which an event names: at these places nothing is a ModelChanged any
        more. To be called by an engine that sets back what it set for the trace, before anybody
        else can change the model.
        """
        self._must_be_open()
        changes = self._steps.code.accept_changes()
        self.events.emit("model.changes_accepted", level=logging.INFO, changes=changes)
        return changes

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Check in steps that a long-lived tensor (KV cache, workspace) stays at its address.

        This holds for graphs captured from now on; the tensor is not kept alive. If `name` is
        watched already, it refers to this tensor from now on, and graphs that read the previous
        one raise MovedTensor until `refresh`.
        """
        self._steps.code.addresses.watch(name, tensor)

    def refresh(self) -> tuple[int, ...]:
        """Follow weights that were replaced and watched names that refer to another tensor.

        Graphs that read one are captured again, also after `seal`; their indices are returned.
        Updates in place need no refresh. Raises ModelMismatch for weights of another form, and
        ModelChanged where the trace relied on what is different now, such as the active adapter.
        With several ranks all must make the same call.
        """
        self._must_be_open()
        if self._steps.code.model_check is not None:
            self._steps.code.model_check.check()
        stale, moved = self._graphs.present.stale(), self._steps.code.moved()
        self._steps.code.bind(self.compiled.rebound())
        self.events.emit("refresh", level=logging.INFO, stale=stale, moved=moved)
        self.backend.synchronize()
        self._graphs.capturer.recapture(list(stale))
        return tuple(stale)

    def release(self) -> None:
        """Free all graphs and their memory. Steps run without; `capture` captures again."""
        self._steps.must_be_idle()
        self.backend.synchronize()
        self._steps.forget_results()
        self.ledger.state_pools(dict.fromkeys(self._graphs.capturer.memory.by_mode, 0))
        self._graphs.release()
        self._stand_between(self._gate or self._graphs.capturer)
        if self._gate is not None:
            self._gate.captures = False
        self._monitor.stop()

    def close(self) -> None:
        """Free graphs, buffers, code and weights; steps raise ModelClosed then. Idempotent."""
        if not self._closed:
            self.events.emit("dispatch", rows=self.usage.rows(), reasons=self.usage.reasons())
            self.release()
            self._closed = True  # a thread may wait for the background
            if self._verification is not None:
                self._verification.stop()
            if self._gate is not None:
                self._gate.stop()
                self._gate = None
            self._graphs.close()
            self._steps.close()

    def report(self) -> dict[str, Any]:
        """What was prepared, captured and dispatched so far; see `runtime.report`."""
        report = build_report(
            self.records,
            self.compiled.plan,
            self.resolved,
            self.usage,
            self._cache,
            self._stated_ledger(),
        )
        return {**report, "shadow": self._shadow and self._shadow.facts()}

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return self._graphs.present.recordings()

    def observe(self, observer: StepObserver) -> None:
        """Tell `observer` about each step from now on."""
        self._steps.observe(observer)

    def unobserve(self, observer: StepObserver) -> None:
        """Stop telling `observer`. Idempotent."""
        self._steps.unobserve(observer)

    def keep_steps(self, count: int) -> None:
        """Log the last `count` steps for `last_steps`, from none on; 0 ends the log."""
        self._steps.keep(count)

    def last_steps(self) -> list[LoggedStep]:
        """The last steps, oldest first: how each ran, why, and how long. Needs `keep_steps`."""
        return list(self.step_log.steps) if self.step_log is not None else []

    def profiler_ranges(self, on: bool = True) -> None:
        """Put steps, graphs, pieces and splitting ops into named ranges for profilers, or no more.

        Without them a step pays nothing for it. Ranges are those of `torch.profiler`.
        """
        self._must_be_open()
        self._graphs.present.set_ranges(on)
        self.unobserve(self._ranges)
        if on:
            self.observe(self._ranges)

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, bound to the weights in use."""
        return self._steps.code.compiled

    @property
    def dispatcher(self) -> Dispatcher:
        """What decides how a batch is run."""
        return self._steps.dispatcher

    @property
    def step_log(self) -> StepLog | None:
        """The log of the last steps, if steps are kept."""
        return self._steps.step_log

    def _use(self, compiled: CompiledModel, dispatcher: Dispatcher) -> StaticInputs:
        """Run steps with `compiled`, so far without graphs; returns the static inputs."""
        buffers, unread = split_buffers(compiled.plan, self._input_buffers)
        if unread:
            self.events.emit("input_buffers.unread", level=logging.INFO, inputs=unread)
        inputs = allocate_inputs(
            compiled, self.config.steps, self._device, buffers, self.backend.order_steps
        )
        queue = getattr(self.backend, "queue", None)
        code = ModelCode(compiled, inputs, self.backend.address, queue)
        self._graphs = Graphs(
            code, inputs, dispatcher, self.config, self.backend, self._steps.context, self.records,
            self._ranks.exchange if self._ranks else single_rank, self.usage.counts,
            self._monitor.start, self._device, self._cache,
        )  # fmt: skip
        between = self._gate or self._graphs.capturer
        self._steps.use(code, dispatcher, self._graphs.present.installed, between)
        self._stand_between(between)
        return inputs

    def _stand_between(self, between: BetweenSteps) -> None:
        """Ask `between` before each step, unless the bundle was refused."""
        self._steps.between = between
        if self._refusal is not None:  # by another thread, perhaps just now
            self._steps.between = self._refusal

    def _stand_behind(self, gate: Gate) -> None:
        """Run steps uncompiled until the gate opens."""
        gate.attach(self, self._serve, self._gate_opened)
        self._run = self._proved(gate.one_at_a_time(self._steps.run))
        self._steps.before_padding = gate.find_form

    def _proved(self, run: Callable[..., Any]) -> Callable[..., Any]:
        return run if self._shadow is None else self._shadow.around(run)

    def _proving(self, settings: Shadow, model: Callable[..., Any]) -> ShadowSteps:
        folder = self.config.codegen.dump_dir or cache_root(self.config)
        shadow = ShadowSteps(
            settings,
            self._steps,
            self.records,
            self._captured,
            self._take_out,
            model,
            folder and folder / "shadow",
        )
        if self._ranks is not None:
            shadow.stop(Stopped.RANKS)
        return shadow

    def _captured(self) -> list[tuple[int, RuntimeMode, Mapping[str, int]]]:
        """Index, mode and sizes of each captured graph."""
        entries, sizes = self.dispatcher.plan.entries, self._graphs.dummies.sizes
        return [(index, entries[index].mode, sizes(index)) for index, _ in self.recordings()]

    def _take_out(self, cause: Cause, graphs: Collection[int], reason: str) -> Cause:
        """Use graphs no more, or compiled code; returns what is out of service.

        A bundle in the private directory is put aside, so that no other start takes it.
        """
        self.backend.synchronize()
        self._steps.forget_results()
        if cause is not Cause.CODE or self._uncompiled is None:
            self._graphs.capturer.take_out(graphs)
            return cause
        compiling = self.records.compile
        digests = [compiling.stored, compiling.bundle.digest if compiling.bundle else None]
        aside = put_aside(self._cache, digests, reason)
        if self._verification is not None:
            self._verification.stop()
        sealed = self._monitor.started
        self.release()
        with allow_compilation():
            self._serve(self._uncompiled(), None)
        if sealed:
            self._monitor.start()
        return Cause.BUNDLE if aside else Cause.CODE

    def _note_failure(self, error: Exception) -> None:
        note_failure(error, self.compiled, self._cache, self.records)

    def _bundle_refused(self) -> None:
        """In the thread of the verification."""
        self._refusal = self._steps.between = Refusal(self._leave_bundle)

    def _leave_bundle(self) -> None:
        """Between two steps: run the model uncompiled, and compile it beside them.

        Raises BundleStale where that is not allowed, before each step.
        """
        self._must_not_be_forced()
        assert self._without_bundle is not None
        captures, sealed = bool(self._graphs.present.recordings()), self._monitor.started
        self.release()
        self._refusal = None
        with allow_compilation():
            uncompiled, self._gate = self._without_bundle()
        self._gate.captures = captures
        self._stand_behind(self._gate)
        self._serve(uncompiled, None)
        if sealed:
            self._monitor.start()

    def _must_not_be_forced(self) -> None:
        """One rank cannot leave its bundle alone: other ranks would run other code."""
        verification = self._verification
        if verification is None or verification.difference is None:
            return
        if self.config.bundle is BundleUse.FORCE or self._ranks is not None:
            raise stale(verification.request, verification.difference)

    def _serve(self, compiled: CompiledModel, policy: Policy | None) -> None:
        """Run steps with `compiled` from now on; no graph was captured so far."""
        dispatcher, code, graphs = self.dispatcher, self._steps.code, self._graphs
        if policy is not None and policy.dispatcher.plan.digest != dispatcher.plan.digest:
            self.resolved, dispatcher = policy.resolved, policy.dispatcher
            self.usage.follow(dispatcher.plan)
        self._use(compiled, dispatcher)
        self._steps.code.addresses.follow(code.addresses)
        self._graphs.dummies.metadata_for = graphs.dummies.metadata_for
        if code.ranged:
            self._graphs.present.set_ranges(on=True)

    def _gate_opened(self, waited: bool | None) -> None:
        """Compiled code serves or will never do so; from now on steps take no lock."""
        self._gate, self._run = None, self._proved(self._steps.run)
        self._steps.before_padding = nothing
        capturer = self._graphs.capturer
        self._stand_between(capturer)
        if waited:
            capturer.startup(serving=True)
        elif waited is not None:
            capturer.startup_while_serving()

    def _make_ready(self, metadata_for: MetadataFor | None) -> None:
        """Before a capture or a warm-up: follow weights that were replaced since.

        Raises ModelClosed, and ModelMismatch for weights of another form.
        """
        self._must_be_open()
        if is_autocast_enabled():
            raise AutocastActive(action="the capture or warm-up")
        if self._steps.code.moved():
            self._steps.code.bind(self.compiled.rebound())
        if metadata_for is not None:
            self._graphs.dummies.metadata_for = metadata_for

    def _must_be_open(self) -> None:
        if self._closed:
            raise ModelClosed()
        self._steps.must_be_idle()

    def _stated_ledger(self) -> MemoryLedger:
        """The ledger, updated with what the graphs of each mode take now."""
        self.ledger.state_pools(self._graphs.capturer.memory.by_mode)
        return self.ledger
