"""Look through entries: list those of a directory, find those nearest to a key."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .keys.key import VARIANT, Difference, Key, diff
from .layers import CacheLayer
from .manifest import MAX_MANIFEST_BYTES, BadManifest, Manifest, decode, read_manifest
from .names import entry_names


def manifests(
    root: Path,
    kind: str | None = None,
    unreadable: Callable[[str, Exception], None] = lambda name, error: None,
) -> Iterator[tuple[Manifest, float]]:
    """Every manifest, of one kind if given, and its last use in seconds since the epoch.

    `unreadable` is called with the relative name of each that cannot be read, and the error.
    Raises OSError if a directory cannot be listed.
    """
    for name in entry_names(root):
        if kind not in (None, name.split("/")[1]):
            continue
        try:
            manifest, last_use = read_manifest(root / name), (root / name).stat().st_mtime
        except (OSError, BadManifest) as error:
            unreadable(name, error)
        else:
            yield manifest, last_use


@dataclass(frozen=True, slots=True)
class NearEntry:
    """An existing entry of `layer`; `differences` are from its key to the requested one."""

    key: Key
    differences: tuple[Difference, ...]
    layer: str


def nearest_entries(
    layers: Iterable[CacheLayer], kind: str, key: Key, at_most: int = 3
) -> list[NearEntry]:
    """The entries of `kind` whose keys differ from `key`, in the fewest factors, nearest first.

    One for each set of differences, the most recently used first among equals; empty if none has
    the same kind of key. What is damaged, unreadable or cannot be listed is skipped.
    """
    near: dict[tuple[str, ...], NearEntry] = {}
    for layer in layers:
        with contextlib.suppress(OSError):
            for name in layer.entries(kind):
                with contextlib.suppress(OSError, BadManifest):
                    manifest, _ = decode(layer.read(name, MAX_MANIFEST_BYTES))
                    entry = manifest.key
                    if not manifest.aside_reason and (differences := _differences(entry, key)):
                        shown = tuple(map(str, differences))
                        near.setdefault(shown, NearEntry(entry, differences, layer.name))
    return heapq.nsmallest(at_most, near.values(), key=lambda entry: len(entry.differences))


def _differences(entry: Key, key: Key) -> tuple[Difference, ...]:
    if entry.kind != key.kind:
        return ()
    factors = (entry.factors, key.factors)
    for each in factors:
        each.pop(VARIANT, None)
    return tuple(diff(*factors))
