"""The tensors inside what an engine passes: metadata, layers, caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from types import MemberDescriptorType
from typing import Any

from torch import Tensor

_DEPTH = 4


def tensors_by_path(path: str, value: Any, depth: int = 0) -> Iterable[tuple[str, Tensor]]:
    """The tensors in containers and attributes, also those of classes, each with its path."""
    if isinstance(value, Tensor):
        yield path, value
        return
    if depth == _DEPTH or value is None or isinstance(value, (bool, int, float, str, bytes, type)):
        return
    items: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", item) for key, item in value.items()]
    elif isinstance(value, (list, tuple)):
        items = [(f"{path}[{index}]", item) for index, item in enumerate(value)]
    elif hasattr(value, "__dict__") or is_dataclass(value):
        items = [(f"{path}.{name}", item) for name, item in _stored(value).items()]
    else:
        return
    for place, item in items:
        yield from tensors_by_path(place, item, depth + 1)


def _stored(value: Any) -> dict[str, Any]:
    """What an object holds, and tensors of its class. No code of its own runs, such as that of a
    configuration which raises where a value differs between layers."""
    stored = dict(getattr(value, "__dict__", ()))
    slotted = is_dataclass(value)
    for name, own in (each for kind in type(value).__mro__ for each in vars(kind).items()):
        if isinstance(own, Tensor):
            stored.setdefault(name, own)
        elif slotted and isinstance(own, MemberDescriptorType):
            with suppress(AttributeError):  # of a slot that nothing was written to
                stored.setdefault(name, own.__get__(value))
    return stored
