"""Helpers for the cache commands: the directory, its entries, and how answers are printed."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...cache.directory import private_root
from ...errors import InvalidSetting, NoSuchEntry
from ..report.sections import size as shown_size

if TYPE_CHECKING:
    from ...cache.manifest import Manifest


def cache_directory(cache_dir: Path | None) -> Path:
    """The directory that the library would use; raises InvalidSetting if there is none."""
    root = private_root(cache_dir)
    if root is None:
        reason = "this user, or the one it names, has no home directory"
        raise InvalidSetting(
            name="--cache-dir", value=cache_dir, reason=reason, expected="a path without ~"
        )
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


def parsed(manifest: Manifest) -> dict[str, Any]:
    """The fields of a manifest as JSON has them."""
    fields: dict[str, Any] = json.loads(manifest.line())
    return fields


def described(manifest: Manifest, last_use: float | None = None) -> dict[str, Any]:
    """An entry in short, as plain data."""
    facts = {
        name: round(value, 1) if isinstance(value, float) else value
        for name, value in manifest.meta.items()
        if isinstance(value, int | float | str | list) and len(str(value)) < 20
    }
    return {
        "entry": f"{manifest.kind}/{manifest.key.digest}",
        "digest": manifest.digest,
        "bytes": sum(blob.size for blob in manifest.blobs.values()),
        "blobs": len(manifest.blobs),
        "facts": facts,
        **({} if last_use is None else {"last_use": last_use}),
    }


def lines(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Described entries as text: when each was used if that is known, else its digest."""
    for entry in entries:
        kind, _, digits = entry["entry"].partition("/")
        used = f"{_ago(entry['last_use']):>12}" if "last_use" in entry else entry["digest"]
        facts = " ".join(f"{name}={value}" for name, value in entry["facts"].items())
        size = f"{shown_size(entry['bytes']):>10}  {entry['blobs']:>3} blobs"
        yield f"{kind}/{digits[:12]}  {size}  {used}  {facts}".rstrip()


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def of_kind(counts: Mapping[str, int], kind: str) -> dict[str, Any]:
    """Lookups of one kind of entry in the counts of all starts."""
    missed = f"{kind}.miss."
    by_reason = {n.removeprefix(missed): c for n, c in counts.items() if n.startswith(missed)}
    hits = counts.get(f"{kind}.hit", 0)
    return {"hits": hits, "misses": sum(by_reason.values()), "by_reason": by_reason}
