"""A warm start is verified; a cold one may serve meanwhile.

Guarantee: code from a bundle is compared with a new trace of the model beside the steps: if two
show that it is stale, the next step runs the model uncompiled, until it is compiled again. A trace
that was disturbed is tried again and stops no step. With `bundle="serve"` an
uncompiled model is compiled beside its steps, and switches to the compiled code between two of
them. A bundle that fails in two starts is put aside. Several ranks replace code at the same step.
Cost: while a thread works, one look at it per step, else none. Switch:
`PIECEGRAPH_OFF=starts`: a start loads or compiles, and nothing runs beside its steps.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch

from ....cache import Cache, Entry, Key
from ....cache.settings import VerifyBundle
from ....compile.bundle.bundle import put_aside
from ....compile.eager_model import uncompiled_model
from ....compile.ir.compilation import BundleMiss, CompileRequest
from ....compile.ir.locations import first_line
from ....compile.pipeline import compile_missing, compile_model, find_model, without_bundle
from ....compile.plan.codegen import failed_piece
from ....compile.plan.compiled_model import CompiledModel
from ....config import BundleUse, Config
from ....dispatch import Batch
from ....errors import ModelClosed, PiecegraphError
from ...capture.capture_all import Progress
from ...core.allowed_work import allow_compilation
from ...core.arguments import checked
from ...core.code import ModelCode
from ...core.records import BundleFailed, Records, Stale, Switched
from ...core.report import verified
from ...core_model import CoreModel
from ...part import CaptureSet, Part, Run
from ...setup.model_policy import Policy
from .background import Background, Libraries, Look
from .tracing_thread import CLOSE_S, PATIENCE_S, WAIT_S
from .verification import Verification, stale

Beside = Background | Verification | Libraries
"""Work beside the steps."""


class StartsPart(Part):
    """Replaces the code of one model. Nothing that it starts keeps the model alive.

    Only one of a step and a replacement happens at a time: another thread may wait for compiled
    code and switch to it. `policy_of` gives the policy of other code, and `look` is what a thread
    does for it beforehand, beside the steps.
    """

    name = "starts"
    offers: ClassVar = {
        "wait_until_compiled": "wait_until_compiled",
        "wait_until_verified": "wait_until_verified",
    }

    def __init__(
        self,
        core: CoreModel,
        policy_of: Callable[[CompiledModel], Policy],
        beside: Background | Verification | None,
        look: Look,
    ) -> None:
        self.between_steps = False
        self.beside: Beside | None = beside
        self._core = core
        self._policy_of = policy_of
        self._look = look
        self._captures = False
        """Whether the startup set is captured once compiled code serves."""
        self._replacing = False
        self._refused = False
        """Whether an explicit wait has raised BundleStale: each step does so, too."""
        self._lock = threading.RLock()

    def start(self) -> None:
        """Begin the work that this start wants beside the steps."""
        if self.beside is not None:
            self._start(self.beside)

    @checked
    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """With `bundle="serve"`: wait for compiled code, switch to it, and capture as at startup.

        Returns whether compiled code serves now: False after `timeout_s`, and where the model
        cannot be compiled, for which the report has the reason. Another thread may run steps
        meanwhile, unless there are several ranks: all must make the same call. Raises ModelClosed.
        """
        self._wait(timeout_s)
        if self._core.closed:
            raise ModelClosed()
        return self._core.code.compiled.traced

    @checked
    def wait_until_verified(self, timeout_s: float | None = None) -> bool | str:
        """Wait until the bundle of this start is compared with a new trace of the model.

        Returns what `report()["cache"]["verified"]` states: whether it is the model's, or why that
        is not known, as after `timeout_s`. A try that waits begins at once. After a difference the
        next step runs the model uncompiled, until it is compiled again. With `bundle="force"` this
        raises BundleStale, as all steps do from then on.
        """
        records = self._core.environment.records
        if isinstance(beside := self.beside, Verification):
            beside.ready()
            beside.thread.join(timeout_s)
        if records.of(Stale) and self._is_forced:
            self._refused = self.between_steps = True
            self._core.link()
            self._must_not_be_refused()
        return verified(records)

    def before_step(self, batch: Batch | None) -> None:
        """Replace code if work beside the steps is over. Raises BundleStale once a wait has."""
        self._core.steps.must_be_idle()
        with self._lock:
            if batch is None and isinstance(self.beside, Verification):
                self.beside.ready()
            if self.beside is not None and self.beside.thread.poll():
                self._follow(self.beside, waited=False)
        self._must_not_be_refused()

    def alike(self) -> dict[str, Any]:
        return {"beside steps": type(self.beside).__name__ if self.beside else None}

    def around(self, run: Run) -> Run:
        if not isinstance(self.beside, Background):
            return run
        lock = self._lock

        def locked(*step: Any) -> Any:
            with lock:
                return run(*step)

        return locked

    def around_capture(self, capture: CaptureSet) -> CaptureSet:
        def capture_or_wait(progress: Progress | None) -> None:
            if isinstance(self.beside, Background):
                self._captures = True  # once compiled code serves
                return
            capture(progress)
            if isinstance(self.beside, Verification):
                self.beside.ready()

        return capture_or_wait

    def code_replaced(self, code: ModelCode) -> None:
        if not self._replacing and not code.compiled.traced and self._stale_work():
            self._stop()  # somebody else has left the code of the bundle

    def released(self) -> None:
        self._captures = False

    def failed(self, error: Exception) -> None:
        environment = self._core.environment
        note_failure(error, self._core.code.compiled, environment.cache, environment.records)

    def close(self) -> None:
        beside = self.beside
        self.forget()
        if beside is not None:
            beside.thread.join(CLOSE_S)

    def forget(self) -> None:
        beside, self.beside = self.beside, None
        if beside is not None:
            beside.thread.stop()

    @property
    def _request(self) -> CompileRequest:
        assert self._core.request is not None
        return self._core.request

    def _stale_work(self) -> bool:
        return isinstance(self.beside, Verification | Libraries)

    def _wait(self, timeout_s: float | None) -> None:
        background, core = self.beside, self._core
        end = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while isinstance(background, Background):
            if background.thread.join(max(0.0, min(1.0, end - time.monotonic()))):
                end = min(end, time.monotonic() + PATIENCE_S)  # for the state of `prepare`
            with self._lock:
                if self.beside is not background:  # another thread has switched
                    return
                core.must_be_open()
                over, expired = background.thread.is_over(expired=time.monotonic() >= end)
                if over:
                    self._follow(background, waited=True)
                if over or expired:
                    return
            time.sleep(WAIT_S)

    def _start(self, beside: Beside) -> None:
        self._use(beside)
        beside.thread.start()

    def _stop(self) -> None:
        self.forget()
        self._use(None)

    def _use(self, beside: Beside | None) -> None:
        self.beside = beside
        self.between_steps = beside is not None or self._refused
        self._core.is_provisional = isinstance(beside, Background)
        self._core.link()

    def _follow(self, beside: Beside, *, waited: bool) -> None:
        """Work beside the steps is over, on all ranks."""
        failure = beside.thread.failure
        if isinstance(beside, Background):
            try:
                if (compiled := beside.compiled()) is not None:
                    self._switch(beside, compiled, waited)
            finally:  # until here steps of another thread wait
                self._stop()
            if (
                compiled is not None
                and self._core.environment.config.bundle is BundleUse.SERVE_AHEAD
            ):
                self._start(Libraries(self._request, self._core.environment.records))
        elif failure:
            self._leave_bundle(failure)
        else:
            self._stop()

    def _switch(self, background: Background, compiled: CompiledModel, waited: bool) -> None:
        core, records = self._core, self._core.environment.records
        captures = self._captures
        with allow_compilation(), records.events.span("switch") as span:
            core.serve(compiled, self._policy_of(compiled))
            if captures and waited:
                core.capturer.startup(serving=True)
            elif captures:
                core.capturer.startup_while_serving()
        thread = background.thread
        records.add(Switched(background.seconds, thread.steps, span.seconds * 1000))

    def _leave_bundle(self, difference: str) -> None:
        """Run the model uncompiled, and compile it beside its steps where that is allowed."""
        core, records = self._core, self._core.environment.records
        if not records.of(Stale):  # another rank has found it
            records.add(Stale(0.0, difference))
        captures = bool(core.graphs.recordings())
        self._stop()
        self._replacing = True
        try:
            core.serve_uncompiled()
        finally:
            self._replacing = False
        if self._is_forced:
            return
        request = self._request
        with allow_compilation():
            missing = without_bundle(request)
            self._start(Background(missing, records, request.exchange, self._look))
        self._captures = captures

    @property
    def _is_forced(self) -> bool:
        return self._core.environment.config.bundle is BundleUse.FORCE

    def _must_not_be_refused(self) -> None:
        if self._refused:
            difference = self._core.environment.records.of(Stale)[0].difference
            raise stale(self._request, difference)


def first_code(
    request: CompileRequest, config: Config, records: Records, look: Look
) -> tuple[CompiledModel, Background | Verification | None]:
    """The code to start with, and what runs beside its steps."""
    serves = config.compile and config.bundle in (BundleUse.SERVE, BundleUse.SERVE_AHEAD)
    found = find_model(request) if serves else compile_model(request)
    if isinstance(found, BundleMiss):
        records.events.emit("background.impossible", level=logging.WARNING, reason=str(found))
        found = compile_model(request)
    if isinstance(found, CompiledModel):
        if not (_loaded_by_any(found, request) and config.cache):
            return found, None
        verification = Verification(request, found, records)
        if config.cache.verify_bundle is VerifyBundle.BACKGROUND:
            return found, verification
        if config.cache.verify_bundle is VerifyBundle.OFF:
            return found, None
        if (refusal := verification.refusal()) is None:
            return found, None
        if config.bundle is BundleUse.FORCE:
            raise stale(request, refusal)
        found = without_bundle(request)
    if serves:
        beside = Background(found, records, request.exchange, look)
        return uncompiled_model(request), beside
    return compile_missing(found), None


def _loaded_by_any(found: CompiledModel, request: CompileRequest) -> bool:
    """Whether a rank has loaded its bundle: then all verify, or none does.

    Where none had one, a rank may have waited for another to compile, and loaded what that stored.
    """
    loaded = {"loaded": found.from_bundle}
    stated = request.exchange("loaded bundle", loaded) if request.exchange else [loaded]
    return any(one["loaded"] for one in stated)


FAILED = "failed"
"""Kind of the cache entries that note a bundle which failed."""


def note_failure(
    error: BaseException, compiled: CompiledModel, cache: Cache, records: Records
) -> None:
    """Note an error of compiled code that came from a bundle; the second puts the bundle aside.

    The first is noted in the cache, for all machines that share a writable layer. One start counts
    once: a device that is broken fails in each step. What raises in an op between pieces, lacks
    memory or is one of our errors is no fault of a bundle.
    """
    if not compiled.from_bundle or compiled.bundle is None:
        return
    if records.of(BundleFailed):
        return
    for cause in _causes(error):
        piece = failed_piece(cause)
        if piece is None or isinstance(cause, PiecegraphError | torch.OutOfMemoryError):
            continue
        reason = f"piece {piece} failed when it ran: {type(cause).__name__}: {first_line(cause)}"
        key = Key.of("trace", {"bundle": compiled.bundle})
        again = isinstance(cache.lookup(FAILED, key, count=False), Entry)
        if again:
            put_aside(cache, compiled.plan, compiled.model, reason)
        else:
            cache.publish(FAILED, key, {}, {})
        records.add(BundleFailed(compiled.bundle, reason, again))
        outcome = "it is put aside" if again else "it is put aside if another start fails in it"
        error.add_note(f"In the code of bundle {compiled.bundle[:12]}: {outcome}.")
        return


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
