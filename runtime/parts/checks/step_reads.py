"""What Python reads of a step while a graph is captured: the graph has those values for good.

During a capture the forward context is one that notes what is read of the metadata, the decision
and the layers: numbers, texts and the like, by their path. Each step of the graph compares them
with its own. Tensors are not noted: a graph reads them by address (`address_checks`). Attributes of
modules are the model's, as globals of its code are: a graph has those of its capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from enum import Enum
from types import FunctionType, MethodType
from typing import Any

import torch

from ....errors import StaleContext
from ...forward_context import ForwardContext

_LEAVES = (
    bool, int, float, complex, str, bytes, type(None), type, Enum, torch.dtype, torch.device,
)  # fmt: skip
_OPAQUE = (torch.Tensor, torch.nn.Module, FunctionType)
_OURS = (__file__, Mapping.get.__code__.co_filename)
"""Files whose functions stand between who reads and `_note`."""


_FACTS = "num_tokens, decision, metadata, layers"


class StepReads:
    """The values that one capture read, by path, such as `metadata.scale`.

    A field is not noted if the class of the object that has it names it in `graph_constants`: the
    engine states that its value at the capture serves every step.
    """

    def __init__(self) -> None:
        self.open = False
        """Whether a graph is being captured now."""
        self._values: dict[str, Any] = {}
        self._places: dict[str, tuple[str, str]] = {}
        """By path: file:line and name of the function that reads it."""
        self._read: Callable[..., tuple[Any, ...]] | None = None

    def __bool__(self) -> bool:
        return bool(self._values)

    def facts(self) -> dict[str, str]:
        """By path: the value, and where it was read."""
        return {
            path: f"{value!r} at {self._places[path][0]}" for path, value in self._values.items()
        }

    def context(self, context: ForwardContext) -> NotingContext:
        """What stands for `context` in the captured region."""
        return NotingContext(context, self)

    def value(self, path: str, value: Any) -> Any:
        """Note `value`, or give one that notes what is read of it."""
        if not self.open or isinstance(value, _OPAQUE):
            return value
        if _is_leaf(value):
            self._note(path, value)
        elif hasattr(value, "tobytes"):  # an array of numpy, which may not be installed
            self._note(f"{path}.tobytes()", value.tobytes())
        elif isinstance(value, list | tuple):
            self._note(f"len({path})", len(value))
            items = [self.value(f"{path}[{i}]", item) for i, item in enumerate(value)]
            return value._make(items) if hasattr(value, "_make") else type(value)(items)
        elif isinstance(value, Mapping):
            return _NotingMapping(value, path, self)
        elif hasattr(value, "__dict__") or is_dataclass(value):
            return _Noting(value, path, self)
        return value

    def check(self, context: ForwardContext, tensors: tuple[Any, ...]) -> None:
        """Compare a step's. Raises StaleContext for a value that the graph has another of."""
        if self._read is None:
            paths = "".join(f"{path}, " for path in self._values)
            self._read = eval(f"lambda {_FACTS}: ({paths})")
        facts = context.num_tokens, context.decision, context.metadata, context.layers
        try:
            if self._read(*facts) == tuple(self._values.values()):
                return
        except (AttributeError, LookupError, TypeError):  # metadata of another form
            pass
        for path, value in self._values.items():
            try:
                now = eval(f"lambda {_FACTS}: {path}")(*facts)
            except (AttributeError, LookupError, TypeError) as error:
                now = error
            if now != value:
                where, reader = self._places[path]
                fact, value, now = _first_difference(path, value, now)
                raise StaleContext(where=where, reader=reader, fact=fact, recorded=value, now=now)

    def _note(self, path: str, value: Any) -> None:
        if path not in self._values:
            self._values[path] = value
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename in _OURS:
                frame = frame.f_back
            code = frame.f_code
            self._places[path] = f"{code.co_filename}:{frame.f_lineno}", code.co_name


class NotingContext:
    """Stands for the forward context of a capture, and notes what is read of it."""

    def __init__(self, context: ForwardContext, reads: StepReads) -> None:
        self._reads = reads
        self._context = context

    @property
    def layers(self) -> Any:
        return self._reads.value("layers", self._context.layers)

    @property
    def metadata(self) -> Any:
        return self._reads.value("metadata", self._context.metadata)

    @property
    def decision(self) -> Any:
        return self._reads.value("decision", self._context.decision)

    @property
    def num_tokens(self) -> Any:
        return self._reads.value("num_tokens", self._context.num_tokens)


class _Noting:
    """Stands for an object of the metadata, also in the object's own methods."""

    __slots__ = ("_noting",)

    def __init__(self, value: Any, path: str, reads: StepReads) -> None:
        object.__setattr__(self, "_noting", (value, path, reads))

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._noting[0])

    def __getattr__(self, name: str) -> Any:
        value, path, reads = object.__getattribute__(self, "_noting")
        found = getattr(value, name)
        if isinstance(found, MethodType) and found.__self__ is value:
            return MethodType(found.__func__, self)
        if name.startswith("__") or name in getattr(type(value), "graph_constants", ()):
            return found
        return reads.value(f"{path}.{name}", found)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._noting[0], name, value)

    def __eq__(self, other: object) -> bool:
        return bool(self._noting[0] == other)

    def __hash__(self) -> int:
        return hash(self._noting[0])


class _NotingMapping(Mapping[Any, Any]):
    """Stands for a dict of the metadata."""

    def __init__(self, value: Mapping[Any, Any], path: str, reads: StepReads) -> None:
        self._value, self._path, self._reads = value, path, reads

    def __getitem__(self, key: Any) -> Any:
        found = self._value[key]
        return self._reads.value(f"{self._path}[{key!r}]", found) if _is_name(key) else found

    def __iter__(self) -> Iterator[Any]:
        keys = [key for key in self._value if _is_name(key)]
        self._reads.value(f"[key for key in {self._path}]", keys)
        return iter(self._value)

    def __len__(self) -> int:
        return int(self._reads.value(f"len({self._path})", len(self._value)))

    def __contains__(self, key: object) -> bool:
        found = key in self._value
        return (
            bool(self._reads.value(f"({key!r} in {self._path})", found)) if _is_name(key) else found
        )


def _first_difference(path: str, recorded: Any, now: Any) -> tuple[str, Any, Any]:
    """The path and the values of the first item that differs, in lists of the same length."""
    if isinstance(recorded, list | tuple) and type(now) is type(recorded):
        for at, (one, other) in enumerate(zip(recorded, now, strict=False)):
            if len(now) == len(recorded) and one != other:
                return _first_difference(f"{path}[{at}]", one, other)
    return path, recorded, now


def _is_name(key: object) -> bool:
    return isinstance(key, str | int)


def _is_leaf(value: Any) -> bool:
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_leaf, value))
    return isinstance(value, _LEAVES)
