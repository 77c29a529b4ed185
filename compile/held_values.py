"""What Python objects hold: their attributes, and what lists, dicts and dataclasses among these
hold. Other objects have state of their own, such as a kernel that was built."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

import torch

from ..torch_compat.basics.tensors import without_regions

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_LONG = 1000
"""Items of a container that is not looked into."""


class HeldValues:
    """What the objects of `roots`, by name, and containers up to `depth` below hold now."""

    def __init__(self, roots: Mapping[str, Any], depth: int = 1) -> None:
        seen = set[int]()
        found = [each for item in roots.items() for each in _holders(*item, depth, seen)]
        self._held = [(path, holder, _copied(holder)) for path, holder in found]

    def changed(self) -> list[str]:
        """Names of what is another value now."""
        names = []
        for path, holder, then in self._held:
            if isinstance(holder, list):
                same = len(holder) == len(then) and all(map(_same, holder, then))
                names += [] if same else [path]
                continue
            for name in {**then, **holder}:
                if not _same(then.get(name, _held), holder.get(name, _held)):
                    names.append(_name(path, name))
        return names

    def restore(self, only: Container[str] | None = None) -> None:
        """Put back what is another value now, or what is in `only` of the names of `changed`."""
        for path, holder, then in self._held:
            if isinstance(holder, list):
                if only is None or path in only:
                    holder[:] = then
                continue
            for name in [*then, *(holder.keys() - then.keys())]:
                if only is not None and _name(path, name) not in only:
                    continue
                if name not in then:
                    del holder[name]
                elif holder.get(name, _held) is not then[name]:
                    holder[name] = then[name]


@contextmanager
def trial_run(model: torch.nn.Module) -> Iterator[None]:
    """A run of the model that is no step: its compiled regions are not compiled for it.

    Restores at the end the attributes of modules and of their tensors, and those of what they hold:
    a run on fakes may keep some, as a table that it makes when it is first needed.
    """
    named = (model.named_modules(), model.named_parameters(), model.named_buffers())
    held = HeldValues({name: each for owners in named for name, each in owners})
    try:
        with without_regions():
            yield
    finally:
        held.restore()


def _holders(path: str, value: Any, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    holder = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
    if not isinstance(holder, dict | list) or id(holder) in seen or len(holder) > _LONG:
        return
    seen.add(id(holder))
    yield path, holder
    items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    for name, item in items if depth else ():
        if isinstance(item, dict | list) or is_dataclass(item):
            yield from _holders(f"{path}.{name}", item, depth - 1, seen)


def _name(path: str, name: object) -> str:
    return f"{path}.{name}".replace("._buffers.", ".").lstrip(".")


def _copied(holder: Any) -> Any:
    return dict(holder) if isinstance(holder, dict) else list(holder)


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and one == other)


_held = object()
