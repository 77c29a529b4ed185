"""Names inside a layer: which are valid, and where each file is, relative to the layer's root.

    entries-v2/<kind>/<2 hex>/<key digest>   manifests, replaced by rename
    blobs-v2/<2 hex>/<sha256>                immutable contents
    quarantine/                              in the private directory only
    locks/                                   there, and leases in a layer that is written to
    tmp/                                     there, and in a directory that a layer writes to

Every layer, local or remote, uses the same relative names, so one can be copied to another. The
schema version is part of the names: versions of the library can share a directory without
misreading or evicting each other's entries.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ..errors import InvalidName

SCHEMA = 2
"""Version of keys and manifests; part of every key as well."""

ENTRY_AREA = f"entries-v{SCHEMA}"
BLOB_AREA = f"blobs-v{SCHEMA}"
SCRATCH_AREA = "tmp"
QUARANTINE_AREA = "quarantine"
LOCK_AREA = "locks"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_name(name: object) -> bool:
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_digest(digest: object) -> bool:
    return isinstance(digest, str) and _DIGEST.fullmatch(digest) is not None


def checked_name(name: str, thing: str) -> str:
    """`name` itself; raises InvalidName if it could leave its directory or be a hidden file."""
    if not is_name(name):
        raise InvalidName(name=name, thing=thing)
    return name


def entry_name(kind: str, key_digest: str) -> str:
    return f"{ENTRY_AREA}/{checked_name(kind, 'kind of entry')}/{key_digest[:2]}/{key_digest}"


def lock_name(kind: str, key_digest: str) -> str:
    return f"{LOCK_AREA}/{checked_name(kind, 'kind of entry')}-{key_digest}"


def blob_name(sha256: str) -> str:
    return f"{BLOB_AREA}/{sha256[:2]}/{sha256}"


def entry_names(root: Path) -> Iterator[str]:
    """Relative names of all files in the entry area, sorted within each directory.

    For eviction, verification and reports; a lookup never lists. Raises OSError.
    """
    for kind in _listed(root / ENTRY_AREA):
        for prefix in _listed(root / ENTRY_AREA / kind):
            for digest in _listed(root / ENTRY_AREA / kind / prefix):
                yield f"{ENTRY_AREA}/{kind}/{prefix}/{digest}"


def blob_names(root: Path) -> Iterator[str]:
    """Relative names of all files in the blob area. Raises OSError."""
    for prefix in _listed(root / BLOB_AREA):
        for digest in _listed(root / BLOB_AREA / prefix):
            yield f"{BLOB_AREA}/{prefix}/{digest}"


def _listed(directory: Path) -> list[str]:
    """Names in a directory; empty if it is missing or a file. Raises any other OSError."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []
