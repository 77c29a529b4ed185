"""The error catalogue: every error piecegraph raises for a user's reason, in one tree.

PiecegraphError
├── ConfigError          a setting is wrong
├── CompileError         the model cannot be traced, split or compiled as asked
├── CacheError           the cache cannot be used as asked
├── DispatchError        sizes, modes or batches that contradict each other
└── RunError             a step, a capture or a replay cannot go on

A class states *what* happened and what *to do* as templates; the place that raises it fills in the
facts, and `where` is the file:line of the user's code when there is one. Free text is never raised.
"""

from __future__ import annotations

import string
from typing import Any, ClassVar


class PiecegraphError(Exception):
    """Base of the tree. `facts` holds the values the templates were filled with."""

    what: ClassVar[str] = ""
    todo: ClassVar[str] = ""

    def __init__(self, *, where: str | None = None, **facts: Any) -> None:
        self.where = where
        self.facts = facts
        super().__init__(self._render())

    def _render(self) -> str:
        place = f" (at {self.where})" if self.where else ""
        advice = f" {self.todo.format(**self.facts)}" if self.todo else ""
        return f"{self.what.format(**self.facts)}{place}.{advice}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.where, self.facts)

    @classmethod
    def fields(cls) -> frozenset[str]:
        """Names of the facts that the templates need."""
        templates = string.Formatter().parse(cls.what + cls.todo)
        return frozenset(name.split(".")[0].split("[")[0] for _, name, _, _ in templates if name)


def _rebuild(
    cls: type[PiecegraphError], where: str | None, facts: dict[str, Any]
) -> PiecegraphError:
    return cls(where=where, **facts)


class ConfigError(PiecegraphError):
    """A setting is wrong."""


class CompileError(PiecegraphError):
    """The model cannot be traced, split or compiled as asked."""


class CacheError(PiecegraphError):
    """The cache cannot be used as asked."""


class DispatchError(PiecegraphError):
    """Sizes, modes or batches that contradict each other."""


class RunError(PiecegraphError):
    """A step, a capture or a replay cannot go on."""


class InvalidSetting(ConfigError):
    what = "setting {name} = {value!r} is not valid: {reason}"
    todo = "Choose {expected}."


# dispatch


# cache


# compile


# runtime


class OutsideStep(RunError):
    what = "the forward context was asked for, but no step is running in this thread"
    todo = "Call the model through its prepared form, or inside `forward_context(...)`."


class UnknownBackend(RunError):
    what = "there is no graph backend called {name!r}"
    todo = "Known are {known}; others register in the entry-point group {group!r}."


class BackendUnavailable(RunError):
    what = "the graph backend {name!r} cannot work here: {reason}"
    todo = "Use the backend 'replay' to test without a device."


class NoCaptureSession(RunError):
    what = "a capture was started outside a capture session"
    todo = "Open `capture_session(...)` around it."


class NestedCapture(RunError):
    what = "{name} was to be captured while another capture is being recorded in this thread"
    todo = "Record one after the other."


class CaptureFailed(RunError):
    what = "capturing {name} failed: {reason}"
    todo = "Nothing of it is kept; the batch can run in a lower mode."


class CaptureOutOfMemory(CaptureFailed):
    what = "capturing {name} ran out of memory: {reason}"
    todo = "Nothing of it is kept; drop the largest capture sizes or leave more memory free."


class HostReadInCapture(RunError):
    what = "{op} needs a tensor's value on the host inside a captured region"
    todo = "Compute it on the device, or put the code into a splitting op."


class EagerResultChanged(RunError):
    what = "splitting op {op} returned {got} at replay, but {expected} when it was captured"
    todo = "A splitting op's results must have the same form for one padded size."


class RecordingReleased(RunError):
    what = "recording {name} was released and cannot be replayed"
    todo = "Capture it again."


class MovedTensor(RunError):
    what = "{name} is not where it was when graphs were captured: {recorded} then, {now} now"
    todo = "Write into the captured memory in place, or refresh the recordings that read it."


class InputMismatch(RunError):
    what = "input {name!r} is {got}, but the model was prepared for {expected}"
    todo = "Pass the input in that form."
