"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..cache import Cache
from ..compile.eager_model import as_it_is
from ..compile.plan.compiled_model import CompiledModel
from ..config import Config, Shadow
from ..dispatch import Batch, Decision, Dispatcher, ResolvedMode, RuntimeMode
from ..errors import AutocastActive, CaptureAfterSeal, ModelClosed
from ..torch_compat.basics.tensors import is_autocast_enabled
from .backends.protocol import Event, GraphBackend
from .capture.dummy_batch import MetadataFor
from .capture.graphs import Graphs
from .capture.recording import Recording
from .core.records import CaptureRecord, Records
from .core.report import build_report, verified
from .core.steps import Steps
from .core.usage import Usage
from .forward_context import ForwardContext
from .parts.log.profiler_ranges import StepRanges
from .parts.log.step_log import LoggedStep, StepLog, StepObserver
from .parts.proof.shadow import Cause, ShadowSteps, Stopped
from .parts.proof.shadow import Keep as MetadataOf
from .parts.ranks.ranks import Ranks, single_rank, start_facts
from .parts.seal.monitor import Monitor
from .parts.starts.bundle_failures import note_failure
from .parts.starts.code_in_service import CodeInService, Source
from .parts.strategies.ledger import MemoryLedger, MemoryPlan, plan_memory
from .parts.strategies.warmup import AuxiliaryTask, capture_items, range_items, run_warmup
from .setup.open_cache import cache_root
from .setup.policy import Policy


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
        source: Source | None = None,
    ) -> None:
        self.config = config
        self.backend = backend
        self.records = records
        note_failure = weakref.WeakMethod(self._note_failure)
        records.code_failed = lambda error: (note := note_failure()) and note(error)
        self.events = records.events
        self.usage = Usage(policy.dispatcher.plan)
        self._cache = cache
        self._ranks = ranks
        self._closed = False
        self._ranges = StepRanges()
        context = ForwardContext(layers or {})
        self._steps = Steps(
            context,
            self.usage,
            config.max_num_reqs,
            backend.event,
            poison_result=backend.poison_result,
        )
        self._shadow: ShadowSteps | None = None
        if config.shadow is not None:
            self._shadow = self._proving(config.shadow, as_it_is(compiled.model))
        self._monitor = Monitor(config.steps.after_seal, self.records, self.backend, context)
        # a dropped model must not be watched for; the monitor does not refer to the model
        weakref.finalize(self, self._monitor.stop).atexit = False
        self._code = CodeInService(
            compiled,
            config,
            policy,
            backend,
            device,
            cache,
            records,
            self._steps,
            self._monitor,
            ranks.exchange if ranks is not None else single_rank,
            proved=self._shadow.around if self._shadow is not None else lambda run: run,
            input_buffers=input_buffers or {},
            source=source,
        )
        self._can_leave_code = source is not None
        self.ledger = self._code.ledger

    def __call__(self, *args: Any, batch: Batch, metadata: Any = None, **kwargs: Any) -> Any:
        """Dispatch and run one step.

        Attention finds `metadata` in the forward context. It is an object, or a function of the
        decision that makes one, for metadata that must be padded to the descriptor.
        """
        if self._code.beside is not None:
            self._code.before_step()
        decision = self._steps.dispatch(batch, None, None)
        if callable(metadata):
            metadata = metadata(decision)
        try:
            return self._code.run(decision, args, kwargs, metadata, batch.num_tokens)
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
        if self._code.beside is not None:
            self._code.before_step()
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
            return self._code.run(decision, args, kwargs, metadata, None)
        except Exception as error:
            self._note_failure(error)
            raise

    def reads_done(self) -> Event:
        """The point at which the steps so far have read all that they read.

        After `synchronize()` of it on the host, or `wait()` for a stream that writes, everything
        that these steps read may be rewritten. Calls it has of `torch.cuda.Event`, which it is on a
        device; `copies_done` comes earlier, for what is copied.
        """
        return self.backend.event()

    def copies_done(self) -> Event:
        """The point at which the last step has copied its inputs, before the rest of its work.

        After it inputs that are not in `reads_in_place` may be rewritten, and what was queued
        before the step is done, such as the engine's copies from pinned memory. Steps record it
        from the first call on, which returns `reads_done()`.
        """
        return self._steps.copied()

    def reads_in_place(self, decision: Decision) -> frozenset[str]:
        """Names of the inputs that a step of this decision reads where the engine has them, or
        writes to.

        Other inputs are copied first, in the order of the stream, and free after `copies_done()`.
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
        if self._code.compiling:
            self._code.captures = True
            return
        self._graphs.startup(progress)
        self._code.ready()

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
        if not self._code.compiling:
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
        if self._code.compiling:
            self._code.find_form()
        graphs, margin = self._graphs.capturer.limit.expected_bytes()
        largest_step = self._graphs.largest_step()
        memory, ledger = self.backend.memory(), self._stated_ledger()
        return plan_memory(memory, ledger, graphs, utilization, margin, largest_step)

    def capture_idle(self, budget_ms: float) -> int:
        """Capture for at most `budget_ms` what DELAYED or LAZY still want; returns how many.

        For an engine that is idle. With several ranks all must make the same call. With
        `bundle="serve"` it also switches to compiled code that is ready.
        """
        if self._code.beside is not None:
            self._code.before_step()
        return self._graphs.capturer.idle(budget_ms)

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """With `bundle="serve"`: wait for compiled code, switch to it, and capture as at startup.

        Returns whether compiled code serves now: False after `timeout_s`, and where the model
        cannot be compiled, for which the report has the reason. Another thread may run steps
        meanwhile, unless there are several ranks: all must make the same call. Raises ModelClosed.
        """
        self._code.wait(timeout_s, self._must_be_open)
        if self._closed:
            raise ModelClosed()
        return self.compiled.traced

    def wait_until_verified(self, timeout_s: float | None = None) -> bool | str:
        """Wait until the bundle of this start is compared with a new trace of the model.

        Returns what `report()["cache"]["verified"]` states: whether it is the model's, or why that
        is not known, as after `timeout_s`. After a difference the next step runs the model
        uncompiled, until it is compiled again. Raises BundleStale with `bundle="force"`.
        """
        self._code.wait_until_verified(timeout_s)
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
        self._code.release()

    def close(self) -> None:
        """Free graphs, buffers, code and weights; steps raise ModelClosed then. Idempotent."""
        if not self._closed:
            self.events.emit("dispatch", rows=self.usage.rows(), reasons=self.usage.reasons())
            self.release()
            self._closed = True  # a thread may wait for compiled code
            self._code.stop()
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
    def resolved(self) -> ResolvedMode:
        """The graph mode, and why it is not the one that was asked for."""
        return self._code.resolved

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, bound to the weights in use."""
        return self._steps.code.compiled

    @property
    def dispatcher(self) -> Dispatcher:
        """What decides how a batch is run."""
        return self._steps.dispatcher

    @property
    def _graphs(self) -> Graphs:
        return self._code.graphs

    @property
    def step_log(self) -> StepLog | None:
        """The log of the last steps, if steps are kept."""
        return self._steps.step_log

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
        if cause is not Cause.CODE or not self._can_leave_code:
            self.backend.synchronize()
            self._steps.forget_results()
            self._graphs.capturer.take_out(graphs)
            return cause
        return Cause.BUNDLE if self._code.take_out(reason) else Cause.CODE

    def _note_failure(self, error: Exception) -> None:
        note_failure(error, self.compiled, self._cache, self.records)

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
