"""A thread that traces a model while other threads of the process serve it.

Only this process knows the model's hooks, patches and registries, so it is traced here. Settings of
torch that belong to a thread or a context are those of the thread that makes this one. What a trace
changes in the whole process is kept away from the threads that serve.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import replace

import torch

from ....compile.ir.compilation import CompileRequest
from ....torch_compat.basics.devices import autocast_devices
from ....torch_compat.tracing.other_threads import keep_device_guard, unseen_by_other_threads
from ...core.allowed_work import allow_compilation
from ...core.exchange import Exchange
from ...core.records import Records

SWITCH_INTERVAL_S = 0.0001
"""How soon the trace gives the interpreter to a step that waits for it; Python's default is 5 ms.

With the default the longest step beside a trace of 32 layers took 0.8 s, with this one 0.4 to 0.5.
"""

STEPS_PER_EXCHANGE = 16
"""How often several ranks compare whether it is over."""

_ONE_AT_A_TIME = threading.Lock()  # the switch interval is of the process


class WorkEnded(BaseException):
    """Ends the work at a checkpoint. No handler of `Exception` on the way may keep it."""


class TracingThread:
    """Runs `work` once beside the steps of a model, and says at which step it is over.

    `work` calls `checkpoint` between its phases and returns why it failed, or nothing. It is ended
    nowhere else: what a phase has replaced in torch is put back. A program that ends waits for the
    next checkpoint: a thread in torch's C++ code aborts an interpreter that has ended (`terminate
    called without an active exception`).
    """

    def __init__(
        self,
        name: str,
        work: Callable[[], str],
        failed: Callable[[Exception], str],
        exchange: Exchange | None = None,
        latest_start_s: float = 0.0,
    ) -> None:
        """`failed` gives the failure for what was raised. `exchange` compares what ranks state.

        The work begins `latest_start_s` after `start`, or earlier when `wake` is set.
        """
        self.failure = ""
        """Why it failed, on any rank, once it is over."""
        self.steps = 0
        self.stopped = False
        self.wake = threading.Event()
        """Lets the work begin; set when it is stopped."""
        self._found = ""
        """What `work` returned. Set by the thread, so `failure` is not: an exchange takes time."""
        self._name = name
        self._work = work
        self._failed = failed
        self._exchange = exchange
        self._latest_start_s = latest_start_s
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._autocast_cache = torch.is_autocast_cache_enabled()
        self._autocast_dtypes = {
            device: torch.get_autocast_dtype(device) for device in autocast_devices()
        }
        keep_device_guard()
        # settings of Dynamo and Inductor are context variables
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    def start(self) -> None:
        atexit.register(self._end)
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def poll(self) -> bool:
        """Whether it is over; called once before each step."""
        self.steps += 1
        if self._exchange is not None and self.steps % STEPS_PER_EXCHANGE:
            return False
        return self.is_over()[0]

    def is_over(self, expired: bool = False) -> tuple[bool, bool]:
        """Whether it has ended on all ranks or failed on one, and whether a rank's time `expired`.

        With several ranks all must make the same call.
        """
        ended, failure = self.join(0), self._found
        if self._exchange is not None:
            own = {"ended": ended, "failure": failure, "expired": expired}
            stated = self._exchange(self._name, own)
            failures = [f"rank {i}: {o['failure']}" for i, o in enumerate(stated) if o["failure"]]
            failure = "; ".join(failures)
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

    def _end(self) -> None:
        self.stop()
        self.join()

    def _run(self) -> None:
        try:
            self._run_as_started()
        except Exception as error:
            self._found = self._failed(error)
        finally:
            atexit.unregister(self._end)

    def _run_as_started(self) -> None:
        self.wake.wait(self._latest_start_s)
        if torch.get_default_device() != self._device:
            torch.set_default_device(self._device)
        torch.set_autocast_cache_enabled(self._autocast_cache)
        for device, dtype in self._autocast_dtypes.items():
            torch.set_autocast_dtype(device, dtype)
        with (
            suppress(WorkEnded),
            self._alone(),
            self._after_imports(),
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            allow_compilation(),
            unseen_by_other_threads(),
        ):
            self._found = self._work()

    @contextmanager
    def _after_imports(self) -> Iterator[None]:
        """Let other threads end their imports of torch.

        Dynamo and Inductor import each other. If one thread begins with the one and another with
        the other, Python gives both a module that is imported by half.
        """
        while any(
            name.startswith("torch.") and getattr(module.__spec__, "_initializing", False)
            for name, module in tuple(sys.modules.items())
        ):
            self.checkpoint()
            time.sleep(0.01)
        yield

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with _ONE_AT_A_TIME:
            self.checkpoint()
            before = sys.getswitchinterval()
            try:
                sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
                yield
            finally:
                sys.setswitchinterval(before)


def beside_steps(request: CompileRequest, apart: Records, thread: TracingThread) -> CompileRequest:
    """The request for work in `thread`, with records of its own: a start's stay as they are."""
    return replace(
        request, records=apart.compile, events=apart.events, serving=True,
        checkpoint=thread.checkpoint,
    )  # fmt: skip
