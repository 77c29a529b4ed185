"""The core of a prepared model: what its steps run, and what happens to that between two steps.

The core makes a model ready and runs its steps. Everything that protects, proves, speeds up or
operates it is a part, which the core calls through `part.Parts` and does not know.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any
from weakref import ref

import torch

from ..compile.bundle.bundle import put_aside
from ..compile.eager_model import eager_model, uncompiled_model
from ..compile.ir.compilation import CompileRequest
from ..compile.plan.compiled_model import CompiledModel
from ..errors import AllCapturesFailed, ModelClosed
from .capture.capture_all import CaptureAll, Capturer, Progress
from .capture.captures import Captures
from .capture.dummy_batch import DummyBatches, MetadataFor
from .capture.graph_set import GraphSet
from .capture.installed_graph import InstalledGraph
from .core.allowed_work import allow_compilation
from .core.code import ModelCode
from .core.environment import Environment
from .core.exchange import told
from .core.records import CaptureFailure, MemoryUse
from .core.static_inputs import allocate_inputs, unread_buffers
from .core.steps import StepRunner, nothing
from .core.surroundings import must_be_plain
from .core.usage import Usage
from .forward_context import ForwardContext
from .part import CaptureSet, Parts
from .setup.model_policy import Policy


class CoreModel:
    """Code, static inputs and graphs of one model. Parts hold it; it calls them through `parts`.

    `request` is what other code of the model is made from; None if there is no other.
    """

    dummies: DummyBatches
    graphs: GraphSet
    captures: Captures
    capturer: Capturer
    run: Callable[..., Any]
    """Runs a step inside what the parts put around it."""

    def __init__(
        self,
        environment: Environment,
        compiled: CompiledModel,
        policy: Policy,
        context: ForwardContext,
        input_buffers: Mapping[str, torch.Tensor],
        request: CompileRequest | None,
    ) -> None:
        self.environment = environment
        self.request = request
        self.resolved = policy.resolved
        self.parts = Parts()
        self.steps = StepRunner(
            context,
            Usage(policy.dispatcher.plan),
            environment.config.max_num_reqs,
            environment.backend,
        )
        self.run = self.steps.run
        self.sealed = False
        self.closed = False
        self.is_provisional = False
        """Whether the model is served uncompiled until compiled code replaces it."""
        self._input_buffers = input_buffers
        self._watched: dict[str, ref[torch.Tensor]] = {}
        self._use(compiled, policy)

    @property
    def code(self) -> ModelCode:
        """The code in service."""
        return self.steps.code

    def link(self) -> None:
        """Ask the parts again what they put around a step and between two."""
        self.steps.before, self.steps.decided = self.parts.between_steps()
        self.run = self.parts.around(self.steps.run)

    def serve(self, compiled: CompiledModel, policy: Policy | None = None) -> None:
        """Run steps with `compiled` from now on; no graph is captured."""
        metadata_for, dispatcher = self.dummies.metadata_for, self.steps.dispatcher
        if policy is not None and policy.dispatcher.plan.digest != dispatcher.plan.digest:
            self.steps.usage.follow(policy.dispatcher.plan)
        else:
            policy = Policy(self.resolved, dispatcher)
        self._use(compiled, policy)
        self.dummies.metadata_for = metadata_for
        self.start_parts()

    def serve_uncompiled(self) -> None:
        """Run the model uncompiled from now on, without graphs; it stays sealed if it was."""
        assert self.request is not None
        sealed = self.sealed
        self.release()
        with allow_compilation():
            self.serve(uncompiled_model(self.request))
        if sealed:
            self.seal()

    def leave_code(self, reason: str) -> bool:
        """Run the model uncompiled from now on, since its code is wrong.

        Its bundles in the private directory are put aside, so that no other start takes them;
        returns whether there was one. They are kept where the model has changed since.
        """
        moved, compiled = self.parts.moved(None), self.code.compiled
        aside = not moved and put_aside(
            self.environment.cache, compiled.plan, compiled.model, reason
        )
        self.serve_uncompiled()
        return aside

    def find_result_form(self) -> None:
        """Find the form of the result of a model that is served uncompiled, if it is not known:
        padding and captures need it."""
        if self.code.compiled.plan.form_is_unknown():
            assert self.request is not None
            self.serve(eager_model(self.request))

    def bind(self) -> None:
        """Follow weights that were replaced. Raises ModelMismatch for weights of another form."""
        for code in self.steps.codes:
            code.bind(code.compiled.rebound())
        self._code_changed()

    def start_parts(self) -> None:
        """Tell the parts which code serves, and let them decide which graphs exist."""
        capturers = (part.make_capturer(self.captures) for part in self.parts)
        self.capturer = next(filter(None, capturers), None) or CaptureAll(self.captures)
        self._code_changed()
        self.link()

    def make_ready(self, metadata_for: MetadataFor | None) -> None:
        """Before a capture or a warm-up: follow weights that were replaced since.

        Raises ModelClosed, and ModelMismatch for weights of another form.
        """
        self.must_be_open()
        must_be_plain("the capture or warm-up")
        if self.parts.moved(None) != []:
            self.bind()
        if metadata_for is not None:
            self.dummies.metadata_for = metadata_for

    def capture(self, progress: Progress | None) -> None:
        """Capture the startup set. Raises AllCapturesFailed if there is no graph after it."""
        capture: CaptureSet = self._capture_startup_set
        for part in reversed(list(self.parts)):
            capture = part.around_capture(capture)
        capture(progress)

    def watch(self, name: str, tensor: torch.Tensor) -> None:
        """Let parts watch a long-lived tensor, which is not kept alive."""
        self._watched[name] = ref(tensor)
        for part in self.parts:
            part.watched(name)

    def watched(self) -> dict[str, torch.Tensor]:
        """The tensors that `watch` was given and that are still alive."""
        alive = {name: tensor() for name, tensor in self._watched.items()}
        return {name: tensor for name, tensor in alive.items() if tensor is not None}

    def refresh(self) -> tuple[int, ...]:
        """See `PreparedModel.refresh`."""
        environment = self.environment
        stated = told(environment.exchange, "refresh", self._stale_graphs)
        stale = sorted({index for one in stated for index in one["stale"]})
        environment.backend.synchronize()
        self.capturer.recapture(stale)
        self.link()
        return tuple(stale)

    def _stale_graphs(self) -> dict[str, list[int]]:
        """Follow what was replaced, and name the graphs that read it: not the same on all ranks."""
        for part in self.parts:
            part.refreshing()
        moved_by_graph = {g.index: self.parts.moved(g) for g in self.graphs.present()}
        stale = {index: names for index, names in moved_by_graph.items() if names != []}
        moved = self.parts.moved(None)
        self.bind()
        events = self.environment.records.events
        events.emit("refresh", level=logging.INFO, stale=stale, moved=moved)
        return {"stale": list(stale)}

    def seal(self) -> None:
        """From now on nothing compiles, and only the strategy captures. Idempotent."""
        self.sealed = True
        for part in self.parts:
            part.sealed()

    def between_steps(self) -> None:
        """Do what waits for the time between two steps."""
        for before_step in self.steps.before:
            before_step(None)

    def release(self, *, keep_plan: bool = False) -> None:
        """Free all graphs. Captures start over, or go on where `keep_plan`."""
        self.environment.backend.synchronize()
        self.steps.forget_results()
        for graph in self.graphs.present():
            self.graphs.remove(graph.index)
        self.captures.release_pool()
        if keep_plan:
            self.capturer.left(self.steps.usage.by_graph())
            self.link()
            return
        self.capturer.released()
        self.sealed = False
        for part in self.parts:
            part.released()
        self.link()

    def close(self) -> None:
        """Free graphs, buffers, code and weights."""
        self.release()
        self.closed = True  # a thread may wait for compiled code
        self.parts.close()
        self.graphs.close()
        self.dummies.metadata_for = None
        self.steps.close()

    def forget_parts(self) -> None:
        """Nobody uses the model any more: end its parts, so that nothing keeps it in memory."""
        self.parts.forget()
        self.steps.before = self.steps.decided = ()
        self.run = self.steps.run
        self.capturer = CaptureAll(self.captures)

    def must_be_open(self) -> None:
        """Raise ModelClosed, or StepInProgress inside a step."""
        if self.closed:
            raise ModelClosed()
        self.steps.must_be_idle()

    def checks_changed(self) -> None:
        """Ask the parts again what steps must satisfy."""
        all_runs: list[ModelCode | InstalledGraph] = [*self.steps.codes, *self.graphs.present()]
        for runs in all_runs:
            runs.checks = tuple(check.call for _, check in self.parts.checks_of(runs))

    def _code_changed(self) -> None:
        for part in self.parts:
            part.code_replaced(self.code)
        self.checks_changed()

    def _use(self, compiled: CompiledModel, policy: Policy) -> None:
        """Run steps with `compiled`, so far without graphs and parts."""
        environment, dispatcher = self.environment, policy.dispatcher
        config, backend, records = environment.config, environment.backend, environment.records
        self.resolved = policy.resolved
        if unread := unread_buffers(compiled.plan, self._input_buffers):
            records.events.emit("input_buffers.unread", level=logging.INFO, inputs=unread)
        codes = [self._code_of(form) for form in compiled.forms()]
        self.dummies = DummyBatches(
            dispatcher.plan, codes, self.steps.context, self.parts.around_dummy_batch,
            records.events.emit, environment.exchange,
        )  # fmt: skip
        self.graphs = GraphSet(config, backend, self.dummies, dispatcher, self.parts)
        self.captures = Captures(
            dispatcher.plan, backend, records, self.graphs, environment.exchange
        )
        self.steps.use(codes, dispatcher, self.graphs.installed)
        for code in codes:
            records.add_opaque(code.compiled.opaque_ops())
        unknown = compiled.plan.form_is_unknown()
        self.steps.before_padding = self._found_by_padding() if unknown else nothing

    def _code_of(self, form: CompiledModel) -> ModelCode:
        environment, backend = self.environment, self.environment.backend
        steps, device = environment.config.steps, environment.device
        inputs = allocate_inputs(form, steps, device, self._input_buffers, backend.order_steps)
        return ModelCode(form, inputs, backend)

    def _found_by_padding(self) -> Callable[[], None]:
        """`find_result_form`, without keeping this object alive."""
        reference = ref(self)

        def find() -> None:
            if (core := reference()) is not None:
                core.find_result_form()

        return find

    def _capture_startup_set(self, progress: Progress | None) -> None:
        records = self.environment.records
        before = len(records.of(CaptureFailure))
        with records.events.span("capture", level=logging.INFO):
            self.capturer.startup(progress)
        self.link()
        failures = records.of(CaptureFailure)[before:]
        present = self.graphs.recordings()
        if failures and not present:
            raise AllCapturesFailed(count=len(failures), reason=failures[0].reason)
        now = self.environment.backend.memory()
        records.add(MemoryUse(sum(each.bytes for _, each in present), now.used, now.free))
