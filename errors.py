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


class FullModeUnsupported(DispatchError):
    what = "graph mode FULL was asked for, but attention group {group!r} can never be captured"
    todo = "Choose PIECEWISE, which runs attention between the graphs, or NONE."


class CaptureSizeInvalid(DispatchError):
    what = "capture size {value!r} at position {position} of the list {fault}"
    todo = "Give distinct whole numbers from 1 to {limit}, ascending."


class PlanInvalid(DispatchError):
    what = "the dispatch plan cannot be: {fault}"
    todo = "Build plans with make_plan, from sizes, query lengths and cases that differ."


class BatchInvalid(DispatchError):
    what = "{batch} contradicts itself or the plan: {fault}"
    todo = "Correct the facts that the engine states about its step."


class NoModeLeft(DispatchError):
    what = "no runtime mode is left for {batch}: of the modes allowed {allowed}, {reason}"
    todo = "Allow NONE, which serves every batch, or allow a mode with a graph that fits."


class DecisionNotPossible(DispatchError):
    what = "the rank decision, slot {slot}, cannot be followed for {batch}: {reason}"
    todo = "Compare the ranks' plan digests and captured slots; all ranks must have the same."


class NoBuckets(DispatchError):
    what = "the limits leave no bucket; rejected were (batch, query, context) {rejected}"
    todo = "Widen the ranges, or raise the limit on tokens or on the model's length."


class BucketFileInvalid(DispatchError):
    what = "{source} has lines that are not buckets: {listed}"
    todo = "Write (batch, query, context), each an int, a list of ints or range(start, stop)."


class BeyondLimits(DispatchError):
    what = "no bucket can hold {shape} (batch, query, context): the limits allow {allowed}"
    todo = "Keep the engine's batches within the limits that its buckets were planned for."


# cache


# compile


# runtime
