"""Which code the steps of a model run, and what replaces it between two of them.

Code from a bundle is verified beside the steps: if it is stale, the next step runs the model
uncompiled. An uncompiled model is compiled beside its steps, and switches to the compiled code.
Code that gave a wrong step is left as well. Several ranks replace code at the same step.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ....cache import Cache
from ....compile.bundle.bundle import put_aside
from ....compile.eager_model import eager_model, uncompiled_model
from ....compile.ir.compilation import CompileRequest
from ....compile.pipeline import without_bundle
from ....compile.plan.compiled_model import CompiledModel
from ....config import BundleUse, Config
from ....dispatch import Dispatcher
from ...backends.protocol import GraphBackend
from ...capture.graphs import Graphs
from ...core.code import ModelCode
from ...core.records import Records, Stale, Switched
from ...core.static_inputs import StaticInputs, allocate_inputs, split_buffers
from ...core.steps import Steps, nothing
from ...setup.policy import Policy
from ..ranks.ranks import Exchange
from ..seal.monitor import Monitor, allow_compilation
from ..strategies.ledger import opening_ledger
from .background import Background, Libraries
from .verification import Verification, stale

Run = Callable[..., Any]
Beside = Background | Verification | Libraries
"""Work beside the steps."""


@dataclass(frozen=True)
class Source:
    """Where other code comes from: `policy_of` gives its policy. `beside` runs beside the steps."""

    request: CompileRequest
    policy_of: Callable[[CompiledModel], Policy]
    beside: Beside | None


class CodeInService:
    """The code and the graphs of one model. Nothing that it starts keeps the model alive.

    Only one of a step and a replacement happens at a time: another thread may wait for compiled
    code and switch to it. `run` runs a step; before each, if there is work `beside` the steps,
    `before_step` is called.
    """

    graphs: Graphs
    run: Run

    def __init__(
        self,
        compiled: CompiledModel,
        config: Config,
        policy: Policy,
        backend: GraphBackend,
        device: torch.device,
        cache: Cache,
        records: Records,
        steps: Steps,
        monitor: Monitor,
        exchange: Exchange,
        *,
        proved: Callable[[Run], Run],
        input_buffers: Mapping[str, torch.Tensor],
        source: Source | None,
    ) -> None:
        self.resolved = policy.resolved
        self.captures = False
        """Whether the startup set is captured once compiled code serves."""
        self.beside: Beside | None = None
        self._config = config
        self._backend = backend
        self._device = device
        self._cache = cache
        self._records = records
        self._steps = steps
        self._monitor = monitor
        self._exchange = exchange
        self._proved = proved
        self._input_buffers = input_buffers
        self._source = source
        self._lock = threading.RLock()
        self.run = proved(steps.run)
        self.ledger = opening_ledger(compiled, self._use(compiled, policy.dispatcher))
        if source is not None and source.beside is not None:
            self._start(source.beside)

    @property
    def compiling(self) -> bool:
        """Whether the model is served uncompiled until it is compiled."""
        return isinstance(self.beside, Background)

    def before_step(self) -> None:
        """Replace code if work beside the steps is over. Raises BundleStale with `force`."""
        self._steps.must_be_idle()
        with self._lock:
            if self.beside is not None and self.beside.thread.poll():
                self._follow(self.beside, waited=False)

    def ready(self) -> None:
        """What the start needs is there: a verification may begin."""
        if isinstance(self.beside, Verification):
            self.beside.ready()

    def wait_until_verified(self, timeout_s: float | None) -> None:
        """Wait for the end of a verification. Raises BundleStale with `force`."""
        if isinstance(beside := self.beside, Verification):
            beside.ready()
            beside.thread.join(timeout_s)
            for found in self._records.of(Stale):
                self._must_not_be_forced(found.difference)

    def wait(self, timeout_s: float | None, must_be_open: Callable[[], None]) -> None:
        """Wait for compiled code and switch to it. `must_be_open` raises for a closed model."""
        background = self.beside
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while isinstance(background, Background):
            background.thread.join(max(0.0, min(1.0, end - time.monotonic())))
            with self._lock:
                if self.beside is not background:  # another thread has switched
                    return
                must_be_open()
                over, expired = background.thread.is_over(expired=time.monotonic() >= end)
                if over:
                    self._follow(background, waited=True)
                if over or expired:
                    return

    def find_form(self) -> None:
        """Find the form of the uncompiled model's result, if it is not known."""
        if self._steps.before_padding is not nothing:
            assert self._source is not None
            self._serve(eager_model(self._source.request))
            self._steps.before_padding = nothing

    def take_out(self, reason: str) -> bool:
        """Run the model uncompiled from now on, since its code is wrong.

        Its bundles in the private directory are put aside, so that no other start takes them;
        returns whether there was one.
        """
        assert self._source is not None
        aside = put_aside(self._cache, self._steps.code.compiled.plan, reason)
        self._replace(uncompiled_model(self._source.request), None)
        return aside

    def release(self) -> None:
        """Free all graphs; captures start over."""
        self._backend.synchronize()
        self._steps.forget_results()
        self.ledger.state_pools(dict.fromkeys(self.graphs.capturer.memory.by_mode, 0))
        self.graphs.release()
        self._steps.between = self.graphs.capturer
        self.captures = False
        self._monitor.stop()

    def stop(self) -> None:
        """End the work beside the steps, as the end of this object does. Idempotent."""
        beside, self.beside = self.beside, None
        if beside is not None:
            beside.thread.stop()

    def _start(self, beside: Beside) -> None:
        self.beside = beside
        weakref.finalize(self, beside.thread.stop)
        if isinstance(beside, Background):
            lock, run = self._lock, self._steps.run

            def locked(*args: Any) -> Any:
                with lock:
                    return run(*args)

            find_form = weakref.WeakMethod(self.find_form)
            self.run = self._proved(locked)
            self._steps.before_padding = lambda: (find := find_form()) and find()
        beside.thread.start()

    def _follow(self, beside: Beside, *, waited: bool) -> None:
        """Work beside the steps is over, on all ranks."""
        failure = beside.thread.failure
        if isinstance(beside, Background):
            self._steps.before_padding = nothing
            try:
                if (compiled := beside.compiled()) is not None:
                    self._switch(beside, compiled, waited)
            finally:  # until here steps of another thread wait
                self.stop()
                self.run = self._proved(self._steps.run)
            if compiled is not None and self._config.bundle is BundleUse.SERVE_AHEAD:
                assert self._source is not None
                self._start(Libraries(self._source.request, self._records))
        elif failure:
            self._leave_bundle(failure)
        else:
            self.stop()

    def _switch(self, background: Background, compiled: CompiledModel, waited: bool) -> None:
        assert self._source is not None
        with allow_compilation(), self._records.events.span("switch") as span:
            self._serve(compiled, self._source.policy_of(compiled))
            if self.captures and waited:
                self.graphs.capturer.startup(serving=True)
            elif self.captures:
                self.graphs.capturer.startup_while_serving()
        thread = background.thread
        self._records.add(Switched(background.seconds, thread.steps, span.seconds * 1000))

    def _leave_bundle(self, difference: str) -> None:
        """Run the model uncompiled, and compile it beside its steps. Raises where that is not
        allowed, before each step."""
        assert self._source is not None
        request = self._source.request
        if not self._records.of(Stale):  # another rank has found it
            self._records.add(Stale(0.0, difference))
        self._must_not_be_forced(difference)
        captures = bool(self.graphs.present.recordings())
        background = Background(without_bundle(request), self._records, request.exchange)
        self._replace(uncompiled_model(request), background)
        self.captures = captures

    def _must_not_be_forced(self, difference: str) -> None:
        assert self._source is not None
        if self._config.bundle is BundleUse.FORCE:
            raise stale(self._source.request, difference)

    def _replace(self, uncompiled: CompiledModel, background: Background | None) -> None:
        sealed = self._monitor.started
        self.stop()
        self.release()
        with allow_compilation():
            if background is not None:
                self._start(background)
            self._serve(uncompiled)
        if sealed:
            self._monitor.start()

    def _serve(self, compiled: CompiledModel, policy: Policy | None = None) -> None:
        """Run steps with `compiled` from now on; no graph was captured so far."""
        steps, code, graphs = self._steps, self._steps.code, self.graphs
        dispatcher = steps.dispatcher
        if policy is not None and policy.dispatcher.plan.digest != dispatcher.plan.digest:
            self.resolved, dispatcher = policy.resolved, policy.dispatcher
            steps.usage.follow(dispatcher.plan)
        self._use(compiled, dispatcher)
        steps.code.addresses.follow(code.addresses)
        self.graphs.dummies.metadata_for = graphs.dummies.metadata_for
        if code.ranged:
            self.graphs.present.set_ranges(on=True)

    def _use(self, compiled: CompiledModel, dispatcher: Dispatcher) -> StaticInputs:
        """Run steps with `compiled`, so far without graphs; returns the static inputs."""
        buffers, unread = split_buffers(compiled.plan, self._input_buffers)
        if unread:
            self._records.events.emit("input_buffers.unread", level=logging.INFO, inputs=unread)
        inputs = allocate_inputs(
            compiled, self._config.steps, self._device, buffers, self._backend.order_steps
        )
        code = ModelCode(compiled, inputs, self._backend)
        self.graphs = Graphs(
            code, inputs, dispatcher, self._config, self._backend, self._steps.context,
            self._records, self._exchange, self._steps.usage.counts, self._monitor.start,
            self._device, self._cache,
        )  # fmt: skip
        self._steps.use(code, dispatcher, self.graphs.present.installed, self.graphs.capturer)
        return inputs
