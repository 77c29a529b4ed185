"""Layers beyond the private directory: shared ones, whose entries prove where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Protocol

from .entries import Readable
from .files import read_file
from .manifest import Manifest
from .signing import Trust

Failures = Literal["ignore", "raise"]
"""What an operating-system or network error of a layer is: a miss, or a LayerFailed."""


class Layer(Readable, Protocol):
    """One place of a cache, asked in order."""

    @property
    def failures(self) -> Failures: ...

    @property
    def writable(self) -> bool: ...

    def store(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        """Publish an entry; raises OSError. Only called if `writable`."""
        ...


class SharedDirectory:
    """A directory that is only read: a layer of a container image, a network mount.

    `trust` says whose entries are believed. What is found is copied to the private directory
    and loaded from there, so that nobody can swap a file between its verification and its use.
    """

    writable = False

    def __init__(self, root: Path, trust: Trust, failures: Failures = "ignore") -> None:
        self.name = f"shared:{root}"
        self.failures: Failures = failures
        self._root = root
        self._trust = trust

    def read(self, name: str, limit: int) -> bytes:
        return read_file(self._root / name, limit)

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        return self._trust(manifest, signature)

    def store(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        raise PermissionError("a shared directory is only read")
