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


class TraceFailed(CompileError):
    what = "the model cannot be traced as one graph: {reason}"
    todo = "Rewrite that line, or move it into a custom op listed in splitting_ops."


class Specialised(CompileError):
    what = "the trace is only valid for {symbol} = {value}: the model fixes that size"
    todo = "Remove the use of {symbol} as a Python number, or declare that dimension static."


class GuardUnproved(CompileError):
    what = "the trace holds only where {expression}, which fails for {symbol} = {sizes}"
    todo = (
        "Make the model independent of that condition, narrow the served range [{low}, {high}], "
        "or choose guards='check'."
    )


class ShapesDiffer(CompileError):
    what = "at {sizes} the model returns {actual} where the trace says {expected}"
    todo = "Look for squeeze() or a branch on a size of one, which leave no guard."


class UnknownSplittingOp(CompileError):
    what = "splitting op {name!r} does not occur in the traced graph"
    todo = "Custom ops in the graph: {known}."


class InputNotTraceable(CompileError):
    what = "the graph takes {source}, which is neither a weight, a buffer nor an argument"
    todo = "Pass it as an argument or register it as a buffer."


class ExampleInputsMissing(CompileError):
    what = "no example can be built for argument {name!r}"
    todo = "Describe it in Config.inputs, e.g. {name}='int64[num_tokens]', or pass example inputs."


class UnknownInput(CompileError):
    what = "Config.inputs names {name!r}, which the model's forward does not take"
    todo = "Its parameters are: {known}."


class ExampleMismatch(CompileError):
    what = "example input {name!r} is {actual}, but Config.inputs says {expected}"
    todo = "Correct one of the two."


class UndeclaredDynamicShape(CompileError):
    what = "it cannot be inferred which dimensions are dynamic in {shapes}"
    todo = "Declare them in Config.inputs, e.g. input_ids='int64[num_tokens]'."


class UnboundSymbol(CompileError):
    what = "the size {expression} is not determined by the sizes of the inputs"
    todo = "Move the op whose result's size depends on data into a splitting op."


class NothingToCompile(CompileError):
    what = "tracing {model} found no tensor operation"
    todo = "Prepare the module whose forward does the work."


class NotPortable(CompileError):
    what = "a plan cannot hold {value!r} of type {kind}"
    todo = "Pass it as a tensor, number, string, slice, dtype, device or enum member."


class PieceFailed(CompileError):
    what = "compiler {compiler!r} failed on piece {piece} ({digest}): {reason}"
    todo = "Run with compiler='eager' to see whether the piece itself is at fault."


class UnknownCompiler(CompileError):
    what = "there is no compiler {name!r}"
    todo = "Known: {known}."


class ModelMismatch(CompileError):
    what = "the model does not fit the plan: {reason}"
    todo = "Use the model that the plan was made for, or prepare it anew."


# runtime
