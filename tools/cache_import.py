"""Read entries from an image that was copied here.

The file or directory is from others: sizes are checked before anything is read, only headers and
descriptors are interpreted, no content is written, and every entry is verified and trusted as
those of a shared layer are: signed, pinned, or by explicit opt-in.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ..cache.files import Irregular, open_regular
from ..cache.layers import Entry, Miss, find
from ..cache.manifest import Manifest
from ..cache.names import ENTRY_AREA, entry_name, is_digest
from ..cache.signing import Trust
from ..errors import BundleRefused, InvalidName
from .cache_image import ROOT

MAX_IMAGE_BYTES = 8 << 30
MAX_JSON_BYTES = 4 << 20
MAX_FILES = 100_000
_CHUNK_BYTES = 1 << 20
_BLOCK_BYTES = 512

Part = tuple[Path, int, int]
"""A file, and offset and size of a part of it."""


class _Refused(Exception):
    """Why an image is refused; the message becomes the reason of BundleRefused."""


def import_image(path: Path, trust: Trust, only: Collection[str] = ()) -> Iterator[Entry]:
    """The entries of an image, a tar or a directory, for `Cache.store`.

    With `only` the entries with these digests, all of which it must have. Everything is verified
    before this returns; the entries are then read one at a time. Raises BundleRefused.
    """
    image = Image(path, trust)
    chosen = [m for m in image.manifests if not only or m.digest in only]
    if missing := set(only) - {manifest.digest for manifest in chosen}:
        raise BundleRefused(path=path, reason=f"it has no entry with digest {min(missing)}")
    return (image.entry(manifest.kind, manifest.key.digest) for manifest in chosen)


class Image:
    """An image layout, a source of entries; `manifests` are those of its entries."""

    name = "imported"

    def __init__(self, path: Path, trust: Trust) -> None:
        """Verify every entry. Raises BundleRefused."""
        self.path = Path(os.path.realpath(path))
        self.manifests: list[Manifest] = []
        self.refuses = trust
        self._parts: dict[str, Part] = {}
        try:
            self._find_files()
            self._find_entries()
        except (_Refused, OSError, ValueError, InvalidName, tarfile.TarError) as error:
            raise BundleRefused(path=path, reason=error) from error
        except (AttributeError, KeyError, TypeError, RecursionError) as error:
            raise BundleRefused(path=path, reason="its descriptors are malformed") from error

    def entry(self, kind: str, key_digest: str) -> Entry:
        """A verified entry. Raises BundleRefused."""
        entry = find(self, kind, key_digest)
        if isinstance(entry, Miss):
            reason = entry.detail if entry.detail else entry.reason
            raise BundleRefused(path=self.path, reason=reason)
        return entry

    def read(self, name: str, limit: int) -> bytes:
        if f"{ROOT}/{name}" not in self._parts:
            raise FileNotFoundError(name)
        return self._read(f"{ROOT}/{name}", limit)

    def _read(self, name: str, limit: int) -> bytes:
        part = self._parts[name]
        if part[2] > limit:
            raise Irregular(0, f"{name} has {part[2]} bytes, more than {limit}", name)
        return b"".join(_chunks(part))

    def _find_files(self) -> None:
        """The files of the layout."""
        if self.path.is_dir():
            blobs = self.path / "blobs" / "sha256"
            for file in (self.path / "index.json", *(blobs / name for name in os.listdir(blobs))):
                descriptor, size = open_regular(file, MAX_IMAGE_BYTES)
                os.close(descriptor)
                self._parts[str(file.relative_to(self.path))] = file, 0, size
        else:
            descriptor, size = open_regular(self.path, MAX_IMAGE_BYTES)
            os.close(descriptor)
            self._add_members((self.path, 0, size))
        if "index.json" not in self._parts:
            _refuse("it is no OCI image layout")

    def _add_members(self, tar: Part) -> None:
        """The regular files of a tar. Raises TarError, also for one that is compressed."""
        file, offset, size = tar
        end = offset + size
        while offset < end:
            header = b"".join(_chunks((file, offset, min(_BLOCK_BYTES, end - offset))))
            if not header.strip(b"\0"):
                return
            member = tarfile.TarInfo.frombuf(header, "utf-8", "strict")
            offset += _BLOCK_BYTES
            if not 0 <= member.size <= end - offset:
                _refuse(f"{member.name} would have {member.size} bytes")
            if member.isreg():
                self._parts[member.name] = file, offset, member.size
            if len(self._parts) > MAX_FILES:
                _refuse(f"it has more than {MAX_FILES} files")
            offset += -(-member.size // _BLOCK_BYTES) * _BLOCK_BYTES

    def _find_entries(self) -> None:
        for described in json.loads(self._read("index.json", MAX_JSON_BYTES))["manifests"]:
            image = json.loads(self._read(self._verified(described), MAX_JSON_BYTES))
            for layer in image["layers"]:
                self._add_members(self._parts[self._verified(layer)])
        for name in sorted(self._parts):
            if name.startswith(f"{ROOT}/{ENTRY_AREA}/"):
                kind, key_digest = name.split("/")[2], name.rpartition("/")[2]
                if name != f"{ROOT}/{entry_name(kind, key_digest)}":
                    _refuse(f"{name} is no name of an entry")
                self.manifests.append(self.entry(kind, key_digest).manifest)
        if not self.manifests:
            _refuse("it holds no entries")

    def _verified(self, described: Any) -> str:
        """The name of the blob that a descriptor names."""
        _, _, digest = described["digest"].partition("sha256:")
        name = f"blobs/sha256/{digest}"
        if not is_digest(digest) or name not in self._parts:
            _refuse(f"blob {digest} is not in it")
        hashed = hashlib.sha256()
        for chunk in _chunks(self._parts[name]):
            hashed.update(chunk)
        if hashed.hexdigest() != digest:
            _refuse(f"blob {digest} has other bytes")
        return name


def _chunks(part: Part) -> Iterator[bytes]:
    """The bytes of a part; raises Irregular if the file has become shorter."""
    file, offset, size = part
    end = offset + size
    descriptor, _ = open_regular(file, MAX_IMAGE_BYTES)
    try:
        while offset < end:
            chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - offset), offset)
            if not chunk:
                raise Irregular(0, "became shorter while it was read", "")
            yield chunk
            offset += len(chunk)
    finally:
        os.close(descriptor)


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)
