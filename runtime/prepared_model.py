"""A model ready to serve: dispatch a batch, run it the fastest way that is correct for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from ..compile.plan.compiled_model import CompiledModel
from ..dispatch import Batch, Decision, Dispatcher, ResolvedMode, RuntimeMode
from ..errors import CaptureAfterSeal, InvalidArgument, NotCopyable
from .backends.protocol import DeviceEvent
from .capture.capture_all import Progress
from .capture.dummy_batch import MetadataFor
from .capture.recording import Recording
from .capture.warmup import AuxiliaryTask, WarmupItem, capture_items, range_items, run_warmup
from .core.arguments import checked
from .core.report import build_report
from .core.steps import CORE_CHECKS, GRAPH_CHECKS
from .core_model import CoreModel


class PreparedModel:
    """A compiled model with its graphs. Made by `prepare`; not to be shared between threads.

    A step is `dispatch`, then `run` with metadata built for the decision's padded descriptor;
    calling the model does both. Results of a graph step are new tensors on static memory, which the
    next step overwrites: copy what must outlive the step.

        prepared = piecegraph.prepare(model, config)
        prepared.capture()
        decision = prepared.dispatch(Batch(num_tokens=3, num_reqs=3, query_len=1))
        hidden = prepared.run(decision, input_ids, positions)

    What a part offers, such as `wait_until_verified` or `last_steps`, is an attribute, too.
    """

    def __init__(self, core: CoreModel) -> None:
        self._core = core
        self.config = core.environment.config
        self.backend = core.environment.backend
        self.records = core.environment.records
        self.events = self.records.events
        self.parts = core.parts
        self.usage = core.steps.usage
        # a dropped model must not be watched for, nor traced: its parts end with it
        weakref.finalize(self, core.forget_parts).atexit = False

    def __call__(self, *args: Any, batch: Batch, metadata: Any = None, **kwargs: Any) -> Any:
        """Dispatch and run one step.

        Attention finds `metadata` in the forward context. It is an object, or a function of the
        decision that makes one, for metadata that must be padded to the descriptor.
        """
        core = self._core
        steps = core.steps
        if steps.has_forms:
            batch = steps.stating_form(batch, args, kwargs)
        decision = steps.dispatch(batch, None, None)
        if callable(metadata):
            if isinstance(metadata, type):
                raise InvalidArgument(
                    call="the model",
                    name="metadata",
                    value=f"the class {metadata.__qualname__}",
                    expected="an object, or a function of the decision that makes one",
                )
            metadata = metadata(decision)
        try:
            return core.run(decision, args, kwargs, metadata, batch.num_tokens)
        except Exception as error:
            self.parts.failed(error)
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
        return self._core.steps.dispatch(batch, allowed_modes, excluded_modes)

    def run(self, decision: Decision, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        """Run one step as decided, on the real (unpadded) inputs.

        Raises InputMismatch, SizeOutOfRange or ArgumentFixed for wrong inputs, BatchExceeded for
        inputs larger than the decision's, and what its checks raise, such as MovedTensor if a
        tensor that a graph reads was moved; see `checks`. A decision whose graph was freed since
        runs without a graph, and is counted so. Zero tokens are a step of padding alone: an idle
        rank makes one so that its collectives run.
        """
        try:
            return self._core.run(decision, args, kwargs, metadata, None)
        except Exception as error:
            self.parts.failed(error)
            raise

    @checked
    def checks(self, decision: Decision | None = None) -> list[dict[str, str]]:
        """What each step of a decision must satisfy, in order: name, owning part, and how often.

        Without a decision it is that of steps without a graph.

            for check in prepared.checks(decision):
                print(check["name"], check["owner"])
        """
        graph = None if decision is None else self._core.graphs.installed[decision.graph_index]
        rows = [(name, "core", "each step") for name in CORE_CHECKS]
        checks = self.parts.checks_of(graph or self._core.code)
        rows += [(c.name, part.name, c.often) for part, c in checks]
        rows += [(name, "core", "each step") for name in GRAPH_CHECKS if graph is not None]
        return [dict(zip(("name", "owner", "often"), row, strict=True)) for row in rows]

    def reads_done(self) -> DeviceEvent:
        """The point at which the steps so far have read all that they read.

        After `synchronize()` of it on the host, or `wait()` for a stream that writes, everything
        that these steps read may be rewritten. It has the methods of `torch.cuda.Event`; on a GPU
        it is one. `copies_done` comes earlier, for what is copied.
        """
        return self.backend.event()

    def copies_done(self) -> DeviceEvent:
        """The point at which the last step has copied its inputs, before the rest of its work.

        After it inputs that are not in `reads_in_place` may be rewritten, and what was queued
        before the step is done, such as the engine's copies from pinned memory. Steps record it
        from the first call on, which returns `reads_done()`.
        """
        return self._core.steps.copied()

    @checked
    def reads_in_place(self, decision: Decision) -> frozenset[str]:
        """Names of the inputs that a step of this decision reads in place, or writes to.

        Other inputs are copied first, in the order of the stream, and free after `copies_done()`.
        Metadata and layers are read in place by every step.
        """
        return self._core.steps.reads_in_place(decision)

    @checked
    def capture(
        self,
        metadata_for: MetadataFor | None = None,
        *,
        progress: Progress | None = None,
        profile_dir: str | Path | None = None,
    ) -> None:
        """Capture what the strategy wants at startup; later calls capture what is still missing.

        Without `metadata_for` the function given last is used, as in every method that captures.
        `progress` is called after each capture. Into `profile_dir` torch's profiler writes a trace
        of each, with ops, shapes, pieces by their layers, and kernels. A capture that fails is
        reported, and batches of its size run without a graph. While the model is served uncompiled
        nothing is captured:
        that follows when it switches to compiled code. Raises AllCapturesFailed if there is no
        graph after it, CaptureAfterSeal, and LayerMissing or MetadataFailed if a dummy batch lacks
        what ops need.
        """
        if self._core.sealed:
            raise CaptureAfterSeal(name="the startup set")
        self._core.make_ready(metadata_for)
        try:
            if profile_dir is not None:
                self.parts.log.profile_captures(profile_dir)
            self._core.capture(progress)
        finally:
            self.parts.log.profile_captures(None)

    @checked
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
        `skip` names what to leave out: "range", "capture", or the name of a task; the cost of that
        is logged. `show` is called with a line of progress for each item. Raises InvalidSetting for
        an unknown name, and what `capture` raises.
        """
        core = self._core
        core.make_ready(metadata_for)
        items, plan = list[WarmupItem](), self.dispatcher.plan
        if not core.is_provisional:
            captures = capture_items(core.capturer.wanted_at_startup(), plan)
            ranges = range_items(self.compiled.plan.symbols, core.dummies.run)
            items = [*ranges, *captures]
        memory = self.backend.memory
        run_warmup(items, tasks, self.capture, plan, skip, self.records, memory, show)

    def seal(self) -> None:
        """From now on nothing compiles, and only the strategy captures."""
        self._core.must_be_open()
        self._core.seal()

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Check in steps that a long-lived tensor (KV cache, workspace) stays at its address.

        This holds for graphs captured from now on; the tensor is not kept alive. If `name` is
        watched already, it refers to this tensor from now on, and graphs that read the previous
        one raise MovedTensor until `refresh`. Raises InvalidArgument for what is no tensor.
        """
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(
                call="watch",
                name=name,
                value=f"a {type(tensor).__name__}",
                expected="a tensor, one for each name",
            )
        self._core.watch(name, tensor)

    def refresh(self) -> tuple[int, ...]:
        """Follow weights that were replaced and watched names that refer to another tensor.

        Graphs that read one are captured again, also after `seal`; their indices are returned.
        Updates in place need no refresh. Raises ModelMismatch for weights of another form, and
        ModelChanged where the trace relied on what is different now, such as the active adapter.
        With several ranks all must make the same call: what is stale on one is captured on all, and
        where one raises, the others raise RanksDisagree.
        """
        self._core.must_be_open()
        return self._core.refresh()

    @checked
    def release(self, keep: Literal["plan"] | None = None) -> None:
        """Free all graphs and their memory. Steps run without; `capture` captures again.

        With `keep="plan"` graphs return by themselves, the most used first: between steps, and in
        `capture_idle`, within `steps.memory_limit`. A sealed model stays sealed. `report()` says
        under `returns` when all were back. With several ranks all must make the same call.

            prepared.release(keep="plan")  # the engine sleeps
            prepared.capture_idle(budget_ms=50)  # it is awake, and has no request yet

        Raises InvalidArgument for another `keep`.
        """
        self._core.steps.must_be_idle()
        self._core.release(keep_plan=keep is not None)

    def close(self) -> None:
        """Free graphs, buffers, code and weights; steps raise ModelClosed then. Idempotent."""
        if not self._core.closed:
            rows, reasons = self.usage.rows(), self.usage.reasons()
            self.events.emit("dispatch", rows=rows, reasons=reasons)
            self._core.close()

    def report(self) -> dict[str, Any]:
        """What was prepared, captured and dispatched so far; see `runtime.core.report`."""
        plan, cache = self.compiled.plan, self._core.environment.cache
        report = build_report(self.records, plan, self.resolved, self.usage, cache)
        for part in self.parts:
            report |= part.facts()
        return report

    def recordings(self) -> list[tuple[int, Recording]]:
        """Captured graph indices with their recordings."""
        return self._core.graphs.recordings()

    def __getattr__(self, name: str) -> Any:
        """What a part offers; it does nothing where the part is switched off or not used."""
        if name.startswith("_") or name == "parts":
            raise AttributeError(name)
        return self.parts.offer(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise NotCopyable()

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.parts.offered()]

    @property
    def resolved(self) -> ResolvedMode:
        """The graph mode, and why it is not the one that was asked for."""
        return self._core.resolved

    @property
    def compiled(self) -> CompiledModel:
        """The compiled model, bound to the weights in use."""
        return self._core.code.compiled

    @property
    def dispatcher(self) -> Dispatcher:
        """What decides how a batch is run."""
        return self._core.steps.dispatcher
