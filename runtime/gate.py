"""Stands before the steps of a model that is served uncompiled, until compiled code serves.

Steps ask it as they ask a capturer. Only one of a step and the switch to compiled code happens at a
time, since another thread may wait for the code and switch to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from ..compile.plan.compiled_model import CompiledModel
from .after_seal import allow_compilation
from .background import Background
from .policy import Policy
from .records import Records, Switched
from .steps.usage import IdleSteps

R = TypeVar("R")

Serve = Callable[[CompiledModel, Policy | None], None]
"""Lets a model run steps with other code, and by another policy if there is one."""

Open = Callable[[bool | None], None]
"""Lets a model run steps without its gate, and captures the startup set: now, between the next
steps, or not at all (None)."""


class Gate:
    """Waits for code that is compiled in the background.

    `policy_of` gives the policy for it. `with_form` makes the uncompiled model with the form of its
    result, which only padding needs and which takes long to find. `captures` says whether the
    startup set is captured once the gate is open.
    """

    active = True

    def __init__(
        self,
        background: Background,
        policy_of: Callable[[CompiledModel], Policy],
        with_form: Callable[[], CompiledModel],
        records: Records,
    ) -> None:
        self.background = background
        self.captures = False
        self.idle_steps: dict[int, IdleSteps] = {}
        self._policy_of = policy_of
        self._with_form: Callable[[], CompiledModel] | None = with_form
        self._records = records
        self._is_open = False

    def attach(self, model: object, serve: Serve, opened: Open) -> None:
        """Stand before `model`, of which these are methods. It is not kept alive.

        `stop` ends the background process, as the end of the model does.
        """
        self._serve, self._opened = weakref.WeakMethod(serve), weakref.WeakMethod(opened)
        self.stop = weakref.finalize(model, self.background.stop)

    def one_at_a_time(self, run: Callable[..., R]) -> Callable[..., R]:
        """`run` with a lock, so that no step runs during the switch."""
        lock = self.background.between_steps

        def locked(*args: Any) -> R:
            with lock:
                return run(*args)

        return locked

    def before_step(self, *step: Any) -> bool:
        """Open if compiled code is ready. Whether a step may be decided otherwise now."""
        return self.poll()

    def poll(self) -> bool:
        """`before_step` for an engine that is idle."""
        with self.background.between_steps:
            return self._is_open or self._open_if_ready(self.background.poll(), waited=False)

    def wait(self, timeout_s: float | None, must_be_open: Callable[[], None]) -> None:
        """Wait for compiled code and open. `must_be_open` raises for a model that was closed."""
        with self.background.between_steps:
            if self._is_open:  # another thread runs steps without the lock
                return
            must_be_open()
        compiled = self.background.wait(timeout_s)
        with self.background.between_steps:
            if not self._is_open:
                must_be_open()
                self._open_if_ready(compiled, waited=True)

    def find_form(self) -> None:
        """Find the form of the uncompiled model's result, if it is not known."""
        serve = self._serve()
        if self._with_form is not None and serve is not None:
            serve(self._with_form(), None)
            self._with_form = None

    def _open_if_ready(self, compiled: CompiledModel | None, *, waited: bool) -> bool:
        """Open if there is compiled code or never will be."""
        if compiled is None and not self.background.over:
            return False
        serve, opened = self._serve(), self._opened()
        assert serve is not None
        assert opened is not None
        self.stop()
        self._is_open, self._with_form = True, None
        if compiled is None:
            opened(None)
            return False
        captures_now = None
        with allow_compilation(), self._records.events.span("switch") as span:
            try:
                serve(compiled, self._policy_of(compiled))
                captures_now = waited if self.captures else None
            finally:
                opened(captures_now)
        background = self.background
        self._records.add(Switched(background.seconds, background.steps, span.seconds * 1000))
        return True
