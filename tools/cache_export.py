"""Ship entries as one file, to copy by hand.

    piecegraph-bundle 1
    {"blobs":[[<sha256>,<bytes>],...],"manifests":[<bytes>,...]}
    the manifests, then the blobs, without separators

Manifests are sorted by kind and key, blobs by sha256, so equal entries give equal bytes. The format
has no paths, no links and no compression, and all lengths are checked against the size of the
file before any content is read. At most one blob is in memory at a time on export, one entry on
import. A file from others is trusted as a shared layer is: signed, pinned, or by explicit opt-in.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from ..cache.files import Irregular, open_regular, place, write_synced
from ..cache.keys.factors import Json, canonical
from ..cache.layers import Entry, Miss, Source, find, read_blob
from ..cache.lock import owned_directory, remove_unowned
from ..cache.manifest import MAX_MANIFEST_BYTES, BadManifest, BlobRef, Manifest, decode, encode
from ..cache.names import blob_name, entry_name, is_digest
from ..cache.signing import SigningKey, Trust
from ..errors import BundleRefused, EntryUnusable

MAGIC = b"piecegraph-bundle 1\n"
MAX_BUNDLE_BYTES = 8 << 30
MAX_HEADER_BYTES = 1 << 20
EXPORT = ".piecegraph-export-"
_CHUNK_BYTES = 1 << 20


class _Refused(Exception):
    """Why a file is refused; the message becomes the reason of BundleRefused."""


def export_entries(
    manifests: Iterable[Manifest], source: Source, path: Path, signer: SigningKey | None = None
) -> None:
    """Write entries of `source`, signed if there is a `signer`, to `path` in one step.

    The umask decides who can read the file: it is made to be read by others. Raises EntryUnusable
    for an entry that is not whole, and OSError, also if `path` exists and is not a regular file.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise Irregular(errno.EINVAL, "it is not a regular file", str(path))
    ordered = sorted(manifests, key=lambda manifest: (manifest.kind, manifest.key.digest))
    encoded = [encode(m, signer.sign(m) if signer else None) for m in ordered]
    blobs = {
        (ref.sha256, ref.size): (manifest, name)
        for manifest in ordered
        for name, ref in manifest.blobs.items()
    }
    refs: list[Json] = [list(ref) for ref in sorted(blobs)]
    header = canonical({"blobs": refs, "manifests": [len(manifest) for manifest in encoded]})
    _check_limit("header", len(MAGIC) + len(header) + 1, MAX_HEADER_BYTES)
    total = len(header) + sum(map(len, encoded)) + sum(size for _, size in blobs)
    _check_limit("file", len(MAGIC) + total + 1, MAX_BUNDLE_BYTES)
    contents = (read_whole(source, *blobs[ref]) for ref in sorted(blobs))
    remove_unowned(path.parent, EXPORT)
    with owned_directory(path.parent, EXPORT) as scratch:
        temporary = scratch / path.name
        parts = itertools.chain([MAGIC, header, b"\n", *encoded], contents)
        write_synced(temporary, parts, mode=0o666)
        place(temporary, path)


def _check_limit(part: str, size: int, limit: int) -> None:
    if size > limit:
        reason = f"its {part} would have {size} bytes, more than {limit}; export fewer entries"
        raise Irregular(errno.EFBIG, reason)


def read_whole(source: Source, manifest: Manifest, name: str) -> bytes:
    """A verified blob of an entry. Raises EntryUnusable if it cannot be had."""
    blob = read_blob(source, manifest, name)
    if isinstance(blob, Miss):
        entry = f"{manifest.kind}/{manifest.key.digest[:12]}"
        raise EntryUnusable(entry=entry, path=source.name, reason=f"{blob.reason}, {blob.detail}")
    return blob


def import_entries(path: Path, trust: Trust, only: Collection[str] = ()) -> Iterator[Entry]:
    """The entries of a file of at most MAX_BUNDLE_BYTES, for `Cache.store`.

    With `only` the entries with these digests, all of which the file must have. Everything is
    verified before this returns; the entries are then read one at a time. Nothing is written and
    no content is interpreted. Raises BundleRefused.
    """
    bundle = BundleFile(path, trust)
    chosen = [m for m in bundle.manifests if not only or m.digest in only]
    if missing := set(only) - {manifest.digest for manifest in chosen}:
        raise BundleRefused(path=path, reason=f"it has no entry with digest {min(missing)}")
    return (_entry(bundle, manifest) for manifest in chosen)


def _entry(bundle: BundleFile, manifest: Manifest) -> Entry:
    entry = find(bundle, manifest.kind, manifest.key.digest)
    if isinstance(entry, Miss):  # the file was changed since it was verified
        raise BundleRefused(path=bundle.path, reason=f"{entry.reason}, {entry.detail}")
    return entry


class BundleFile:
    """An exported file. `manifests` are those that it holds."""

    name = "imported"

    def __init__(self, path: Path, trust: Trust) -> None:
        """Verify every byte of the file. Raises BundleRefused."""
        self.path = Path(os.path.realpath(path))
        self.manifests: list[Manifest] = []
        self._trust = trust
        self._parts: dict[str, tuple[int, int]] = {}  # offset and size by relative name
        try:
            descriptor, size = open_regular(self.path, MAX_BUNDLE_BYTES)
            try:
                self._verify(descriptor, size)
            finally:
                os.close(descriptor)
        except (_Refused, BadManifest, OSError) as error:
            raise BundleRefused(path=path, reason=error) from error

    def read(self, name: str, limit: int) -> bytes:
        if name not in self._parts:
            raise FileNotFoundError(name)
        offset, size = self._parts[name]
        if size > limit:
            raise Irregular(0, f"has {size} bytes, more than {limit}", name)
        descriptor, _ = open_regular(self.path, MAX_BUNDLE_BYTES)
        try:
            return b"".join(_chunks(descriptor, offset, size))
        finally:
            os.close(descriptor)

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        return self._trust(manifest, signature)

    def _verify(self, descriptor: int, size: int) -> None:
        refs, lengths, start = _header(os.pread(descriptor, MAX_HEADER_BYTES, 0))
        if start + sum(lengths) + sum(ref.size for ref in refs) != size:
            _refuse("its parts do not add up to its size")
        for length in lengths:
            if length > MAX_MANIFEST_BYTES:
                _refuse(f"it has a manifest of {length} bytes, more than {MAX_MANIFEST_BYTES}")
            manifest, signature = decode(b"".join(_chunks(descriptor, start, length)))
            if refusal := self.refuses(manifest, signature):
                _refuse(refusal)
            self.manifests.append(manifest)
            self._parts[entry_name(manifest.kind, manifest.key.digest)] = start, length
            start += length
        for ref in refs:
            digest = hashlib.sha256()
            for chunk in _chunks(descriptor, start, ref.size):
                digest.update(chunk)
            if digest.hexdigest() != ref.sha256:
                _refuse(f"blob {ref.sha256} has other bytes")
            self._parts[blob_name(ref.sha256)] = start, ref.size
            start += ref.size
        for manifest in self.manifests:
            for name, ref in manifest.blobs.items():
                if self._parts.get(blob_name(ref.sha256), (0, -1))[1] != ref.size:
                    _refuse(f"blob {name} of {manifest.key.digest} is not in it")


def _chunks(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    """The bytes of a part; raises Irregular if the file has become shorter."""
    end = offset + size
    while offset < end:
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - offset), offset)
        if not chunk:
            raise Irregular(0, "became shorter while it was read", "")
        yield chunk
        offset += len(chunk)


def _header(start: bytes) -> tuple[list[BlobRef], list[int], int]:
    """Blobs, lengths of manifests, and the offset of the first manifest."""
    end = start.find(b"\n", len(MAGIC))
    if not start.startswith(MAGIC) or end < 0:
        _refuse("it is not a piecegraph bundle of this version")
    line = start[len(MAGIC) : end]
    try:
        header = json.loads(line)
        refs = [BlobRef(sha256, size) for sha256, size in header["blobs"]]
        lengths = list(header["manifests"])
        in_form = canonical(header) == line and header.keys() == {"blobs", "manifests"}
    except (ValueError, TypeError, KeyError, RecursionError):
        _refuse("its header is malformed")
    sizes = [*lengths, *(ref.size for ref in refs)]
    if not all(type(size) is int and size >= 0 for size in sizes):
        _refuse("its header has an invalid size")
    if not in_form or not all(is_digest(ref.sha256) for ref in refs):
        _refuse("its header is not in canonical form")
    return refs, lengths, end + 1


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)
