"""What a look-up gives: an entry with its verified contents in hand, or the reason for a miss."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .files import Irregular, read_file
from .keys.factors import Json
from .keys.key import Key
from .listing import read_manifest
from .manifest import MAX_BLOB_BYTES, MAX_MANIFEST_BYTES, BadManifest, Manifest, decode
from .names import BLOB_AREA, blob_name, entry_name


@dataclass(frozen=True, slots=True)
class Entry:
    """A manifest and the bytes of its blobs by name, each checked against its sha256.

    Nothing can go wrong between a hit and its use: the contents are here, not on a disk.
    `layer` names where they came from.
    """

    manifest: Manifest
    contents: Mapping[str, bytes] = field(repr=False)
    layer: str

    @property
    def key(self) -> Key:
        return self.manifest.key

    @property
    def meta(self) -> Mapping[str, Json]:
        return self.manifest.meta

    @property
    def digest(self) -> str:
        """Equal for entries with equal key, meta and contents: what ranks compare."""
        return self.manifest.digest

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(len(content) for content in self.contents.values())


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is no entry.

    `reason` is one of: "absent"; "unreadable" (an error of the system);
    "incomplete" (a blob was evicted or is not visible yet); "damaged"; "untrusted"; "disabled"
    (no layer at all). `damaged` is the relative name of the file at fault, where one is.
    """

    reason: str
    detail: str = ""
    layer: str = ""
    damaged: str | None = None


class Readable(Protocol):
    """A place that may hold entries under the names of names.py."""

    @property
    def name(self) -> str: ...

    def read(self, name: str, limit: int) -> bytes:
        """The bytes at a relative name; FileNotFoundError or another OSError.

        No more than about `limit` bytes are read; whether they are right is for the caller.
        """
        ...

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        """Why what this place says may not be loaded, or None."""
        ...


def find(place: Readable, kind: str, key_digest: str) -> Entry | Miss:
    """The entry of `kind` under `key_digest` with every blob verified, or why there is none."""
    name = entry_name(kind, key_digest)
    try:
        manifest, signature = decode(place.read(name, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return Miss("absent", layer=place.name)
    except OSError as error:
        return _unreadable(place, name, error)
    except BadManifest as error:
        return Miss("damaged", f"manifest: {error}", place.name, name)
    if (manifest.kind, manifest.key.digest) != (kind, key_digest):
        return Miss("damaged", "the manifest is of another entry", place.name, name)
    if refusal := place.refuses(manifest, signature):
        return Miss("untrusted", refusal, place.name)
    return _with_contents(place, manifest)


def is_intact(name: str, file: Path) -> bool:
    """Whether `file` is what belongs under the relative `name`."""
    area, *kind, _, digest = name.split("/")
    try:
        if area == BLOB_AREA:
            return hashlib.sha256(read_file(file, MAX_BLOB_BYTES)).hexdigest() == digest
        manifest = read_manifest(file)
    except (OSError, BadManifest):
        return False
    return ([manifest.kind], manifest.key.digest) == (kind, digest)


def _with_contents(place: Readable, manifest: Manifest) -> Entry | Miss:
    contents = {}
    for name, ref in manifest.blobs.items():
        where = blob_name(ref.sha256)
        try:
            content = place.read(where, ref.size)
        except FileNotFoundError:
            return Miss("incomplete", f"blob {name} is missing", place.name)
        except OSError as error:
            return _unreadable(place, where, error)
        if not ref.matches(content):
            return Miss("damaged", f"blob {name} has other bytes", place.name, where)
        contents[name] = content
    return Entry(manifest, contents, place.name)


def _unreadable(place: Readable, name: str, error: OSError) -> Miss:
    if isinstance(error, Irregular):
        return Miss("damaged", str(error), place.name, name)
    return Miss("unreadable", str(error), place.name)
