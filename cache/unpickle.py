"""Unpickling that can build only what the caller lists."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any

from ..errors import ForbiddenPickle


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: bytes, allowed: Collection[tuple[str, str]]) -> None:
        super().__init__(io.BytesIO(content))
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._allowed:
            raise ForbiddenPickle(name=f"{module}.{name}")
        return super().find_class(module, name)

    def persistent_load(self, pid: Any) -> Any:
        raise ForbiddenPickle(name=f"persistent id {pid!r}")


def unpickle(content: bytes, allowed: Collection[tuple[str, str]]) -> Any:
    """Load a pickle whose every class or function is in `allowed`, as (module, qualified name).

    The list has to be exact: no prefixes, and nothing that calls or imports what its arguments
    name. Raises ForbiddenPickle before anything else is imported, or what `pickle` raises for
    damaged data, which verified bytes do not hold.
    """
    return _Unpickler(content, allowed).load()
