"""A thread that traces a model while other threads of the process serve it.

Only this process knows the model's hooks, patches and registries, so it is traced here. The state
of torch is that of `prepare`: what torch keeps for each thread is installed, for the rest the
thread waits, and what was done under another state is done again. What a trace changes in the whole
process is kept away from the threads that serve.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace

from ....compile.ir.compilation import CompileRequest
from ....errors import SettingsChanged
from ....torch_compat.basics.settings import TorchState
from ....torch_compat.tracing.first_imports import import_alone, import_tracer
from ....torch_compat.tracing.other_threads import keep_device_guard, unseen_by_other_threads
from ...core.allowed_work import allow_compilation
from ...core.exchange import Exchange, by_rank
from ...core.records import Records

SWITCH_INTERVAL_S = 0.0001
"""How soon the trace gives the interpreter to a step that waits for it; Python's default is 5 ms.

With the default the longest step beside a trace of 32 layers took 0.8 s, with this one 0.4 to 0.5.
"""

STEPS_PER_EXCHANGE = 16
"""How often several ranks compare whether it is over."""

PAUSES_S = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 0.0)
"""Before the next try after each that told nothing, the last one included."""

WAIT_S = 0.05
PATIENCE_S = 600.0
"""How long a try waits for the state of `prepare`."""
CLOSE_S, EXIT_S = 10.0, 120.0
"""How long `close`, and a program that ends, wait for the next checkpoint."""

_ONE_AT_A_TIME = threading.Lock()  # the switch interval is of the process
os.register_at_fork(after_in_child=_ONE_AT_A_TIME._at_fork_reinit)  # type: ignore[attr-defined]


class WorkEnded(BaseException):
    """Ends the work at a checkpoint. No handler of `Exception` on the way may keep it."""


class NotKnown(Exception):
    """A try told nothing, for the reason given."""


def reason_of(error: Exception) -> str:
    """Why a try failed, or told nothing."""
    return str(error) if isinstance(error, NotKnown) else f"{type(error).__name__}: {error}"


class TracingThread:
    """Runs `work` beside the steps of a model until its outcome is settled, and says at which step.

    `work` calls `checkpoint` between its phases and returns why it failed, or nothing. A process
    does not hold still beside it: a failure counts when it is the same twice, and what is NotKnown
    is tried again. It is ended nowhere else than at a checkpoint: what a phase has replaced in
    torch is put back. A program that ends waits for the next one: a thread in torch's C++ code
    aborts an interpreter that has ended (`terminate called without an active exception`).
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], str],
        failed: Callable[[Exception], str],
        exchange: Exchange | None = None,
        latest_start_s: float = 0.0,
        state: TorchState | None = None,
    ) -> None:
        """`failed` gives the failure for what was raised. `exchange` compares what ranks state.

        The work begins `latest_start_s` after `start`, or earlier when `wake` is set. `state` is
        that of now by default.
        """
        self.failure = ""
        """Why it failed, on any rank, once it is over."""
        self.steps = 0
        self.stopped = False
        self.wake = threading.Event()
        """Lets the work begin, and ends a pause between two tries; set when it is stopped."""
        self._found = ""
        """What `work` returned. Set by the thread, so `failure` is not: an exchange takes time."""
        self._name = name
        self._work = work
        self._failed = failed
        self._exchange = exchange
        self._latest_start_s = latest_start_s
        self._state = state or TorchState.now()
        self._changes: list[str] = []
        """What other threads have changed meanwhile."""
        keep_device_guard()
        # settings of Dynamo and Inductor are context variables
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def start(self) -> None:
        atexit.register(self._end)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether it has ended."""
        self._thread.join(None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        return not self._thread.is_alive()

    def poll(self) -> bool:
        """Whether it is over; called once before each step."""
        self.steps += 1
        if self._exchange is not None and self.steps % STEPS_PER_EXCHANGE:
            return False
        return self.is_over()[0]

    def is_over(self, expired: bool = False) -> tuple[bool, bool]:
        """Whether it has ended on all ranks or failed on one, and whether a rank's time `expired`.

        What succeeded has not ended while the process is in another state than it was made under.
        With several ranks all must make the same call.
        """
        failure = self._found
        ended = self.join(0) and (bool(failure) or not self._state.changed_in_process())
        if self._exchange is not None:
            own = {"ended": ended, "failure": failure, "expired": expired}
            stated = self._exchange(self._name, own)
            failure = "; ".join(by_rank(stated, "failure"))
            ended = all(other["ended"] for other in stated)
            expired = any(other["expired"] for other in stated)
        self.failure = failure
        return ended or bool(failure), expired

    def stop(self) -> None:
        """Let the work end at its next checkpoint; does not wait for it. Idempotent."""
        self.stopped = True
        self.wake.set()

    def checkpoint(self) -> None:
        """End the work here if it was stopped."""
        if self.stopped:
            raise WorkEnded

    def changed_meanwhile(self) -> str:
        """`CompileRequest.changed_meanwhile`."""
        changes = "; ".join(dict.fromkeys(self._changes))
        self._changes.clear()
        return changes

    def _settled(self) -> str:
        """What `work` returns: nothing, or the same failure twice in a row.

        What it raises is a failure, too. NotKnown and SettingsChanged are none: it is tried again,
        with growing pauses.
        """
        before, last = "", Exception()
        for pause_s in PAUSES_S:
            self._wait_for_state()
            try:
                found = self._tried_apart()
            except (NotKnown, SettingsChanged) as error:
                before, last = "", error
                self._pause(pause_s)
                continue
            if not found or found == before:
                return found
            before, last = found, NotKnown(found)
        return self._failed(last)

    def _tried_apart(self) -> str:
        """`_tried` in a thread of its own: what an error leaves in a thread, such as a dispatch key
        of torch that is set, the next try would meet."""
        outcome = Future[str]()

        def run() -> None:
            try:
                with self._state.installed(), allow_compilation():
                    outcome.set_result(self._tried())
            except BaseException as error:  # the end of the work, too
                outcome.set_exception(error)

        start = copy_context().run
        thread = threading.Thread(target=start, args=(run,), name=self._name, daemon=True)
        thread.start()
        return outcome.result()

    def _tried(self) -> str:
        with self._alone():
            try:
                found = self._work()
            except (NotKnown, SettingsChanged):
                raise
            except Exception as error:
                found = self._failed(error)
        if found and (changed := self.changed_meanwhile()):
            raise SettingsChanged(changed=changed)
        return found

    def _wait_for_state(self) -> None:
        """Wait until the process is in the state of `prepare`. Raises SettingsChanged."""
        waited_s = 0.0
        while changed := self._state.changed_in_process():
            if waited_s > PATIENCE_S:
                raise SettingsChanged(changed=changed)
            self._pause(WAIT_S)
            waited_s += WAIT_S

    def _pause(self, seconds: float) -> None:
        self.wake.clear()
        self.checkpoint()
        self.wake.wait(seconds)
        self.checkpoint()

    def _end(self) -> None:
        self.stop()
        self.join(EXIT_S)

    def _run(self) -> None:
        try:
            self._run_as_started()
        except Exception as error:
            self._found = self._failed(error)
        finally:
            atexit.unregister(self._end)

    def _run_as_started(self) -> None:
        self.wake.wait(self._latest_start_s)
        with suppress(WorkEnded):
            with _one_at_a_time():
                import_alone(_import_cold_half, self.checkpoint)
            self._found = self._settled()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _one_at_a_time(), unseen_by_other_threads() as self._changes:
            self.checkpoint()
            yield


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """One of our threads works, and each that waits for the interpreter gets it soon. So does ours,
    which gives it away with each file that an import looks for."""
    with _ONE_AT_A_TIME:
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
            yield
        finally:
            sys.setswitchinterval(before)


def _import_cold_half() -> None:
    """All that traces, ours too: a fork waits for it, and no child has a module by half."""
    import_tracer()
    from ....compile import ahead, verify  # noqa: F401


def beside_steps(request: CompileRequest, apart: Records, thread: TracingThread) -> CompileRequest:
    """The request for work in `thread`, with records of its own: a start's stay as they are."""
    return replace(
        request, records=apart.compile, events=apart.events, serving=True,
        checkpoint=thread.checkpoint, changed_meanwhile=thread.changed_meanwhile,
    )  # fmt: skip
