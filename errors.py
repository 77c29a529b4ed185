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


class InvalidFactor(CacheError):
    what = "factor {name} cannot be part of a key: {reason}"
    todo = "{remedy}."


class InvalidName(CacheError):
    what = "{name!r} cannot name a {thing} in the cache"
    todo = "Use letters, digits, '.', '_' and '-', at most 128, the first no sign."


class InvalidEntry(CacheError):
    what = "entry {entry} cannot be stored: {reason}"
    todo = "Give meta as numbers, strings, lists and dicts, and large contents as blobs."


class UndeclaredVariable(CacheError):
    what = "environment variable {name} is read but not declared"
    todo = "Declare it in cache/environment.py, as a factor or with the reason why it is none."


class UntrustedDirectory(CacheError):
    what = "cache directory {path} is not safe to load code from: {problem}"
    todo = "Run `{command}`, or choose another directory."


class CacheNotWritable(CacheError):
    what = "cache directory {path} cannot be written: {reason}"
    todo = "Choose another directory, give this one as a read-only layer, or turn the cache off."


class LayerFailed(CacheError):
    what = "cache layer {layer} failed: {reason}"
    todo = "Mend the layer, or let its failures be ignored."


class InvalidSecret(CacheError):
    what = "the key that signs cache entries cannot be used: {reason}"
    todo = "Give at least 16 bytes in {variable}, or a file only you can read in {file_variable}."


class BundleRefused(CacheError):
    what = "bundle file {path} is refused: {reason}"
    todo = "Export it again from a cache that verifies."


class ForbiddenPickle(CacheError):
    what = "stored data names {name}, which an artifact has no need of; nothing was executed"
    todo = "Remove the entry: it was not written by piecegraph, or by another version of it."


# compile


# runtime
