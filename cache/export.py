"""Entries as one file, to copy by hand or to ship.

    piecegraph-bundle 1
    {"blobs":[[<sha256>,<bytes>],...],"manifests":[<bytes>,...]}
    the manifests, then the blobs, without anything between them

Manifests are sorted by kind and key, blobs by sha256, so that equal entries give equal bytes. There
are no paths in it to escape by, no links and no compression to blow up, and every length is
checked against the file's before anything is read. A file shipped by others is believed as a
shared layer is: signed, pinned, or by explicit opt-in.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from ..errors import BundleRefused
from .entries import Entry
from .files import Irregular, place, read_file, write_synced
from .keys.factors import Json, canonical
from .manifest import BadManifest, BlobRef, Manifest, decode, encode
from .names import is_digest
from .signing import Trust, sign

MAGIC = b"piecegraph-bundle 1\n"
MAX_BUNDLE_BYTES = 8 << 30
MAX_HEADER_BYTES = 1 << 20


class _Refused(Exception):
    """Why a file is not taken; the text becomes the reason of BundleRefused."""


def export_entries(entries: Iterable[Entry], path: Path, secret: bytes | None = None) -> None:
    """Write `entries`, signed if there is a `secret`, to `path` in one step.

    The file is as readable as the umask allows: it is made to be read by others. Raises OSError,
    also where there is something else than a file already.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise Irregular(errno.EINVAL, "it is not a regular file", str(path))
    ordered = sorted(entries, key=lambda entry: (entry.manifest.kind, entry.key.digest))
    manifests = [
        encode(entry.manifest, sign(entry.manifest, secret) if secret is not None else None)
        for entry in ordered
    ]
    blobs = {
        (ref.sha256, ref.size): entry.contents[name]
        for entry in ordered
        for name, ref in entry.manifest.blobs.items()
    }
    refs: list[Json] = [list(ref) for ref in sorted(blobs)]
    header: Json = {"blobs": refs, "manifests": [len(manifest) for manifest in manifests]}
    contents = (blobs[ref] for ref in sorted(blobs))
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".export-") as scratch:
        temporary = Path(scratch) / path.name
        parts = [MAGIC, canonical(header), b"\n", *manifests, *contents]
        write_synced(temporary, b"".join(parts), mode=0o666)
        place(temporary, path)


def import_entries(path: Path, trust: Trust, limit: int = MAX_BUNDLE_BYTES) -> list[Entry]:
    """The entries of a file of at most `limit` bytes, all verified, for `Cache.store`.

    Nothing is written and nothing of the contents is interpreted. Raises BundleRefused.
    """
    try:
        return _entries(memoryview(read_file(Path(os.path.realpath(path)), limit)), trust)
    except (_Refused, BadManifest, OSError) as error:
        raise BundleRefused(path=path, reason=error) from error


def _entries(content: memoryview, trust: Trust) -> list[Entry]:
    refs, lengths, start = _header(content)
    if start + sum(lengths) + sum(ref.size for ref in refs) != len(content):
        _refuse("its parts do not add up to its size")
    manifests = []
    for length in lengths:
        manifest, signature = decode(bytes(content[start : start + length]))
        if refusal := trust(manifest, signature):
            _refuse(refusal)
        manifests.append(manifest)
        start += length
    contents: dict[BlobRef, bytes] = {}
    for ref in refs:
        contents[ref] = bytes(content[start : start + ref.size])
        if not ref.matches(contents[ref]):
            _refuse(f"blob {ref.sha256} has other bytes")
        start += ref.size
    return [_entry(manifest, contents) for manifest in manifests]


def _entry(manifest: Manifest, contents: dict[BlobRef, bytes]) -> Entry:
    try:
        blobs = {name: contents[ref] for name, ref in manifest.blobs.items()}
    except KeyError as missing:
        _refuse(f"{missing} is not in it")
    return Entry(manifest, blobs, "imported")


def _header(content: memoryview) -> tuple[list[BlobRef], list[int], int]:
    """Blobs, lengths of manifests, and where the first manifest starts."""
    end = bytes(content[:MAX_HEADER_BYTES]).find(b"\n", len(MAGIC))
    if content[: len(MAGIC)] != MAGIC or end < 0:
        _refuse("it is no piecegraph bundle of this version")
    line = bytes(content[len(MAGIC) : end])
    try:
        header = json.loads(line)
        refs = [BlobRef(sha256, size) for sha256, size in header["blobs"]]
        lengths = list(header["manifests"])
        in_form = canonical(header) == line and header.keys() == {"blobs", "manifests"}
    except (ValueError, TypeError, KeyError, RecursionError):
        _refuse("its header is malformed")
    sizes = [*lengths, *(ref.size for ref in refs)]
    if not all(type(size) is int and size >= 0 for size in sizes):
        _refuse("its header has a size that is none")
    if not in_form or not all(is_digest(ref.sha256) for ref in refs):
        _refuse("its header is not in canonical form")
    return refs, lengths, end + 1


def _refuse(reason: str) -> NoReturn:
    raise _Refused(reason)
