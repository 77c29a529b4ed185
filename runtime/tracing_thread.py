"""A thread that traces a model while other threads of the process serve it.

Only this process knows the model's hooks, patches and registries, so it is traced here. Settings of
torch that belong to a thread or a context are those of the thread that makes this one. What a trace
changes in the whole process is kept away from the threads that serve.
"""

from __future__ import annotations

import atexit
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context

import torch

from ..torch_compat.tracing.other_threads import unseen_by_other_threads
from .after_seal import allow_compilation

SWITCH_INTERVAL_S = 0.0001
"""How soon the trace gives the interpreter to a step that waits for it; Python's default is 5 ms.

With the default the longest step beside a trace of 32 layers took 0.8 s, with this one 0.4 to 0.5.
"""

_ONE_AT_A_TIME = threading.Lock()  # the switch interval is of the process


class Stopped(BaseException):
    """Ends the work at a checkpoint. No handler of `Exception` on the way may keep it."""


class TracingThread:
    """Runs `work` once, which calls `checkpoint` between its phases.

    Nothing ends it elsewhere: what a phase has replaced in torch is put back. A program that ends
    waits for the next checkpoint: a thread in torch's C++ code aborts an interpreter that has ended
    (`terminate called without an active exception`).
    """

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self.stopped = False
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

    def stop(self) -> None:
        """Let the work end at its next checkpoint; does not wait for it. Idempotent."""
        self.stopped = True

    def checkpoint(self) -> None:
        """End the work here if it was stopped."""
        if self.stopped:
            raise Stopped

    def _end(self) -> None:
        self.stop()
        self.join()

    def _run(self) -> None:
        try:
            self._run_as_started()
        finally:
            atexit.unregister(self._end)

    def _run_as_started(self) -> None:
        if torch.get_default_device() != self._device:
            torch.set_default_device(self._device)
        with (
            suppress(Stopped),
            self._alone(),
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            allow_compilation(),
            unseen_by_other_threads(),
        ):
            self._work()

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
