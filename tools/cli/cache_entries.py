"""Helpers for the cache commands: the directory, its entries, and entries by name."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import NoSuchEntry

if TYPE_CHECKING:
    from ...cache.manifest import Manifest


def cache_directory(cache_dir: Path | None) -> Path:
    """The directory that the library would use."""
    from ... import Config, cache_root

    root = cache_root(Config(cache_dir=cache_dir))
    assert root is not None
    return root


def manifests(root: Path) -> list[tuple[Manifest, float]]:
    """Every manifest that can be read, and when it was last used (seconds since the epoch)."""
    from ...cache import inspection

    def report(name: str, error: Exception) -> None:
        print(f"unreadable: {name}: {error}", file=sys.stderr)

    return list(inspection.manifests(root, unreadable=report))


def named(root: Path, names: Iterable[str]) -> list[Manifest]:
    """The single entry that each name matches; raises NoSuchEntry for none or more than one."""
    there, chosen = manifests(root), []
    for name in names:
        kind, _, digits = name.rpartition("/")
        found = [
            manifest
            for manifest, _ in there
            if manifest.key.digest.startswith(digits) and kind in ("", manifest.kind)
        ]
        if len(found) != 1:
            raise NoSuchEntry(path=root, name=name)
        chosen += found
    return chosen


def label(manifest: Manifest) -> str:
    return f"{manifest.kind}/{manifest.key.digest[:12]}"
