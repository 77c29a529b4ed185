"""Helpers for the cache commands: the directory, its entries, and how answers are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

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


def parsed(manifest: Manifest) -> dict[str, Any]:
    """The fields of a manifest as JSON has them."""
    fields: dict[str, Any] = json.loads(manifest.line())
    return fields


def described(manifest: Manifest) -> dict[str, Any]:
    """An entry in short, as plain data."""
    return {
        "entry": f"{manifest.kind}/{manifest.key.digest}",
        "digest": manifest.digest,
        "bytes": sum(blob.size for blob in manifest.blobs.values()),
        "blobs": len(manifest.blobs),
    }


def of_kind(counts: Mapping[str, int], kind: str) -> dict[str, Any]:
    """Lookups of one kind of entry in the counts of all starts."""
    missed = f"{kind}.miss."
    by_reason = {n.removeprefix(missed): c for n, c in counts.items() if n.startswith(missed)}
    hits = counts.get(f"{kind}.hit", 0)
    return {"hits": hits, "misses": sum(by_reason.values()), "by_reason": by_reason}


def say(as_json: bool, facts: Any, shown: Any) -> None:
    """Print an answer: `facts` as JSON, or what is shown, a text or a table."""
    if as_json:
        print(json.dumps(facts, indent=2), flush=True)
    elif isinstance(shown, str):
        print(shown, flush=True)
    else:
        from rich.console import Console

        Console().print(shown)
