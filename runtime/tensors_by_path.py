"""The tensors inside what an engine passes: metadata, layers, caches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
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
    elif not hasattr(value, "__dict__") and not is_dataclass(value):
        return
    else:
        of_class = (vars(kind).items() for kind in type(value).__mro__)
        shared = [name for each in of_class for name, own in each if isinstance(own, Tensor)]
        own = [f.name for f in fields(value)] if is_dataclass(value) else list(vars(value))
        names = dict.fromkeys([*own, *shared])
        items = [(f"{path}.{name}", getattr(value, name, None)) for name in names]
    for place, item in items:
        yield from tensors_by_path(place, item, depth + 1)
