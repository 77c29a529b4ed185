"""A thread that traces a model while other threads of the process serve it.

Only this process knows the model's hooks, patches and registries, so it is traced here. Settings of
torch that belong to a thread or a context are those of the thread that makes this one. What a trace
changes in the whole process is kept away from the threads that serve.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from types import FrameType

import torch

from ..torch_compat.tracing.other_threads import unseen_by_other_threads
from .after_seal import allow_compilation

SWITCH_INTERVAL_S = 0.0001
"""How soon the trace gives the interpreter to a step that waits for it; Python's default is 5 ms.

With the default the longest step beside a trace of 32 layers took 0.8 s, with this one 0.4 to 0.5.
"""

END_S = 10.0
"""How long `stop` waits for the thread, which ends at its next line of Python that is not in an
import."""

POLL_S = 0.01
"""How often it is looked whether the thread may end where it is."""

AGAIN_S = 3.0
"""When a thread that still runs is told again to end. Python drops an exception that arrives in a
finalizer or a callback, and a handler of the code that runs may take it."""

_ONE_AT_A_TIME = threading.Lock()  # the switch interval is of the process


class Stopped(BaseException):
    """Ends the thread. No handler of `Exception` on the way may keep it."""


class TracingThread:
    """Runs `work` once. It is a daemon: a program that ends need not wait for a trace."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self._work = work
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._stopped = threading.Event()
        self._ended = False
        self._ending = threading.Lock()
        # settings of Dynamo and Inductor are context variables
        run = copy_context().run
        self._thread = threading.Thread(target=run, args=(self._run,), name=name, daemon=True)

    @property
    def stopped(self) -> bool:
        return self._stopped.is_set()

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the end; returns whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def stop(self, wake: Callable[[], None] = lambda: None) -> None:
        """End the thread soon, and wait a moment for that. Idempotent; does nothing inside it.

        `wake` ends what it waits for.
        """
        if self.stopped or self._thread is threading.current_thread():
            return
        self._stopped.set()
        wake()
        ending = threading.Thread(target=self._end, name="piecegraph-end", daemon=True)
        ending.start()
        ending.join(END_S)

    def _end(self) -> None:
        """End the thread where it may end.

        A number of a thread that has ended may be another thread's, and `is_alive` says yes for a
        moment if two threads ask: the thread states its own end, under a lock.
        """
        while (thread := self._thread.ident) is not None:
            with self._ending:
                if self._ended:
                    return
                if may_end := _may_end(sys._current_frames().get(thread)):
                    target, error = ctypes.c_ulong(thread), ctypes.py_object(Stopped)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(target, error)
            self._thread.join(AGAIN_S if may_end else POLL_S)

    def _run(self) -> None:
        if torch.get_default_device() != self._device:
            torch.set_default_device(self._device)
        try:
            try:
                with self._alone(), torch.inference_mode(self._inference):
                    with torch.set_grad_enabled(self._grad), allow_compilation():
                        with unseen_by_other_threads():
                            self._work()
            finally:
                with self._ending:
                    self._ended = True
        except Stopped:
            pass

    @contextmanager
    def _alone(self) -> Iterator[None]:
        while not _ONE_AT_A_TIME.acquire(timeout=0.05):  # so that `stop` is noticed
            pass
        before = sys.getswitchinterval()
        try:
            sys.setswitchinterval(min(before, SWITCH_INTERVAL_S))
            yield
        finally:
            sys.setswitchinterval(before)
            _ONE_AT_A_TIME.release()


def _may_end(frame: FrameType | None) -> bool:
    """Whether a thread may end where it is.

    A module whose import is left halfway stays broken in this process, and what a context manager
    has replaced stays replaced if its end is left halfway.
    """
    while frame is not None:
        code = frame.f_code
        importing = code.co_filename.startswith("<frozen importlib")
        if importing or code.co_name in ("__enter__", "__exit__"):
            return False
        frame = frame.f_back
    return True
