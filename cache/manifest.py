"""The manifest of an entry: which factors it was made from and which blobs it consists of.

On disk a manifest is two or three lines:

    {"blobs":{...},"factors":{...},"key":...,"key_kind":...,"kind":...,"meta":{...},"schema":2}
    sha256 <64 hex over line 1>
    ed25519 …                                only if it is signed, see signing.py

The parser trusts nothing: it checks the digest, that line 1 is in canonical form, every type and
name, and that the factors give the key. Accepted bytes have one reading only, and BadManifest is
the only exception.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InvalidFactor, InvalidName
from .files import read_file
from .keys.factors import Json, canonical
from .keys.key import Key
from .names import BLOB_AREA, SCHEMA, is_digest, is_name

MAX_MANIFEST_BYTES = 16 << 20
MAX_BLOB_BYTES = 4 << 30
MAX_SIGNATURE_BYTES = 512

_FIELDS = {"blobs", "factors", "key", "key_kind", "kind", "meta", "schema"}


class BadManifest(Exception):
    """These bytes are not a manifest; the message says why."""


@dataclass(frozen=True, slots=True)
class BlobRef:
    """A blob by content: `sha256` in hex, `size` in bytes."""

    sha256: str
    size: int

    @classmethod
    def of(cls, content: bytes) -> BlobRef:
        return cls(hashlib.sha256(content).hexdigest(), len(content))

    def matches(self, content: bytes) -> bool:
        return len(content) == self.size and hashlib.sha256(content).hexdigest() == self.sha256


ASIDE = "aside"
"""In the meta of a mark, which takes the place of an entry, and of the entry that replaces it."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """`kind` is the kind of entry ("artifact", "bundle"), `key` identifies its inputs.

    `meta` is plain data of the publisher, `blobs` maps names to contents.
    """

    kind: str
    key: Key
    meta: Mapping[str, Json]
    blobs: Mapping[str, BlobRef]

    def line(self) -> bytes:
        """Line 1 of the file without the newline: canonical JSON."""
        return canonical(
            {
                "blobs": {n: {"sha256": b.sha256, "size": b.size} for n, b in self.blobs.items()},
                "factors": self.key.factors,
                "key": self.key.digest,
                "key_kind": self.key.kind,
                "kind": self.kind,
                "meta": dict(self.meta),
                "schema": SCHEMA,
            }
        )

    def put_aside(self, code: Collection[str], reason: str) -> Manifest:
        """What takes the place of this entry, so that nobody loads blobs with these digests."""
        return Manifest(self.kind, self.key, aside_meta(code, reason), {})

    @property
    def aside(self) -> frozenset[str]:
        """Digests of blobs that nobody is to load: of a mark, or of what replaced one."""
        facts = self.meta.get(ASIDE)
        code = facts.get("code") if isinstance(facts, dict) else None
        return frozenset(map(str, code)) if isinstance(code, list) else frozenset()

    @property
    def aside_reason(self) -> str:
        """Why this is a mark and no entry; empty if it is one."""
        facts = self.meta.get(ASIDE)
        return str(facts.get("reason")) if isinstance(facts, dict) and not self.blobs else ""

    def holds(self, code: Collection[str]) -> bool:
        """Whether it has a blob with one of these digests."""
        return any(ref.sha256 in code for ref in self.blobs.values())

    @property
    def digest(self) -> str:
        """sha256 of line 1: identifies the entry with its contents, for pins and for ranks."""
        return hashlib.sha256(self.line()).hexdigest()


def aside_meta(code: Collection[str], reason: str) -> dict[str, Json]:
    """Meta that says which blobs nobody is to load."""
    return {ASIDE: {"code": [*sorted(code)], "reason": reason}}


def encode(manifest: Manifest, signature: str | None = None) -> bytes:
    """The bytes of the manifest's file; `signature` is a line of signing.py."""
    line = manifest.line()
    lines = [line, b"sha256 " + hashlib.sha256(line).hexdigest().encode()]
    if signature is not None:
        lines.append(signature.encode())
    return b"\n".join(lines) + b"\n"


def decode(content: bytes) -> tuple[Manifest, str | None]:
    """The manifest and its signature, if it has one. Raises BadManifest."""
    if len(content) > MAX_MANIFEST_BYTES:
        _bad(f"larger than {MAX_MANIFEST_BYTES} bytes")
    lines = content.split(b"\n")
    if len(lines) not in (3, 4) or lines[-1] != b"":
        _bad("not two or three lines")
    line, checksum = lines[0], lines[1]
    if checksum != b"sha256 " + hashlib.sha256(line).hexdigest().encode():
        _bad("its digest does not match")
    return _manifest(_fields(line)), _signature(lines[2]) if len(lines) == 4 else None


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file, without its signature. Raises OSError or BadManifest."""
    manifest, _ = decode(read_file(path, MAX_MANIFEST_BYTES))
    return manifest


def is_intact(name: str, file: Path) -> bool:
    """Whether `file` has the content that belongs under the relative `name`."""
    area, *kind, _, digest = name.split("/")
    try:
        if area == BLOB_AREA:
            return hashlib.sha256(read_file(file, MAX_BLOB_BYTES)).hexdigest() == digest
        manifest = read_manifest(file)
    except (OSError, BadManifest):
        return False
    return ([manifest.kind], manifest.key.digest) == (kind, digest)


def _signature(line: bytes) -> str:
    """The line as it is: signing.py alone knows what it means."""
    if not 0 < len(line) <= MAX_SIGNATURE_BYTES or not line.isascii():
        _bad("its signature is malformed")
    return line.decode()


def _fields(line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
        if canonical(fields) != line:
            _bad("not in canonical form")
        if b"\\ud" in line:
            json.dumps(fields, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise BadManifest(f"not JSON: {type(error).__name__}") from None
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        _bad("missing or unknown fields")
    if type(fields["schema"]) is not int or fields["schema"] != SCHEMA:
        _bad("another schema")
    return fields


def _manifest(fields: dict[str, Any]) -> Manifest:
    if not is_name(fields["kind"]) or not is_name(fields["key_kind"]):
        _bad("malformed kind")
    if not isinstance(fields["factors"], dict) or not isinstance(fields["meta"], dict):
        _bad("factors and meta are not objects")
    try:
        key = Key.of(fields["key_kind"], fields["factors"])
    except (InvalidFactor, InvalidName) as error:
        raise BadManifest(f"forbidden factors: {error}") from None
    if key.digest != fields["key"]:
        _bad("its factors do not give its key")
    return Manifest(fields["kind"], key, fields["meta"], _blobs(fields["blobs"]))


def _blobs(blobs: object) -> dict[str, BlobRef]:
    if not isinstance(blobs, dict):
        _bad("blobs are not an object")
    return {name: _blob(name, ref) for name, ref in blobs.items()}


def _blob(name: str, ref: object) -> BlobRef:
    if not is_name(name):
        _bad("malformed blob name")
    if not isinstance(ref, dict) or ref.keys() != {"sha256", "size"}:
        _bad(f"malformed reference to blob {name}")
    size = ref["size"]
    if not is_digest(ref["sha256"]) or type(size) is not int or not 0 <= size <= MAX_BLOB_BYTES:
        _bad(f"malformed reference to blob {name}")
    return BlobRef(ref["sha256"], size)


def _bad(reason: str) -> NoReturn:
    raise BadManifest(reason)
