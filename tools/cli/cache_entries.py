"""The cache as its commands see it: where it is, which entries there are, which one is meant."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import EntryUnusable, NoSuchEntry

if TYPE_CHECKING:
    from ...cache import Entry
    from ...cache.manifest import Manifest


def cache_directory(cache_dir: Path | None) -> Path:
    """The directory that the library would use."""
    from ... import Config, cache_root

    root = cache_root(Config(cache_dir=cache_dir))
    assert root is not None
    return root


def manifests(root: Path) -> list[tuple[Manifest, float]]:
    """Every manifest that can be read, and when it was last used (seconds since the epoch)."""
    from ...cache import listing

    def tell(name: str, error: Exception) -> None:
        print(f"unreadable: {name}: {error}", file=sys.stderr)

    return list(listing.manifests(root, unreadable=tell))


def named(root: Path, names: Iterable[str]) -> list[Manifest]:
    """The one entry that each name means; raises NoSuchEntry if there is none or more than one."""
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


def whole_entry(root: Path, manifest: Manifest) -> Entry:
    """The entry with its contents; raises EntryUnusable if it is not whole."""
    from ...cache import Miss
    from ...cache.entries import find
    from ...cache.layers import SharedDirectory
    from ...cache.signing import anybody

    found = find(SharedDirectory(root, anybody), manifest.kind, manifest.key.digest)
    if isinstance(found, Miss):
        reason = f"{found.reason}, {found.detail}" if found.detail else found.reason
        raise EntryUnusable(entry=label(manifest), path=root, reason=reason)
    return found


def is_pinned(root: Path, manifest: Manifest) -> bool:
    from ...cache import evict

    return evict.is_pinned(root, manifest.kind, manifest.key.digest)


def label(manifest: Manifest) -> str:
    return f"{manifest.kind}/{manifest.key.digest[:12]}"
