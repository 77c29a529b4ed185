"""Which entries of a shared layer are trusted: signed ones, pinned ones, or all.

A signature is Ed25519 over line 1 of the manifest, which holds the kind, the key and the sha256 of
every blob, so it covers the whole entry. Builders hold the private key; who only verifies holds
public keys and cannot sign. A file of keys has one key a line:

    ed25519-private <64 hex> name=ci expires=2027-06-30 epoch=2    a builder's, in a file of its own
    ed25519 <64 hex> name=ci expires=2027-06-30 epoch=2            trusted, at least of this epoch
    revoked <64 hex, or the key's id>                              trusted no more, nowhere

The line of a signature in a manifest is `ed25519 <key id> <epoch> <128 hex>`. The epoch is signed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from ..errors import InvalidKeyFile, UntrustedDirectory
from .files import OTHERS_ANY, check_writers, place, read_file, write_synced
from .keys.environment import SIGNING_KEY_FILE, TRUSTED_KEYS_FILE, read
from .lock import owned_directory
from .manifest import Manifest
from .names import checked_name

Trust = Callable[[Manifest, "str | None"], "str | None"]
"""From a manifest and its signature: the reason to refuse the entry, or None."""

_DOMAIN = b"piecegraph cache entry, ed25519\n"
_SIGNATURE = re.compile(r"ed25519 ([0-9a-f]{16}) (\d{1,9}) ([0-9a-f]{128})")
_VALUE = re.compile("[0-9a-f]{64}")
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key by its 32 bytes in hex; trusted until the end of the day `expires` (UTC).

    Its signatures of epochs before `epoch` are refused.
    """

    value: str
    name: str = ""
    expires: date | None = None
    epoch: int = 1

    @property
    def id(self) -> str:
        return hashlib.sha256(bytes.fromhex(self.value)).hexdigest()[:16]

    @property
    def expired(self) -> bool:
        return self.expires is not None and datetime.now(UTC).date() > self.expires

    def line(self) -> str:
        """As in a file of trusted keys."""
        return f"ed25519 {self.value}{self.options()}"

    def options(self) -> str:
        expires = f" expires={self.expires}" if self.expires else ""
        return f"{f' name={self.name}' if self.name else ''}{expires} epoch={self.epoch}"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A builder's private key, 32 bytes in hex, with its public one."""

    public: PublicKey
    private: str = field(repr=False)

    @classmethod
    def of(cls, private: str, **facts: Any) -> SigningKey:
        """The key of 32 random bytes; `facts` are those of `PublicKey`."""
        public = _private(private).public_key().public_bytes_raw().hex()
        return cls(PublicKey(public, **facts), private)

    @classmethod
    def new(cls, **facts: Any) -> SigningKey:
        return cls.of(secrets.token_hex(32), **facts)

    def sign(self, manifest: Manifest) -> str:
        """The signature line of an entry."""
        signature = _private(self.private).sign(_signed_bytes(manifest, self.public.epoch))
        return f"ed25519 {self.public.id} {self.public.epoch} {signature.hex()}"

    def next_epoch(self) -> SigningKey:
        return replace(self, public=replace(self.public, epoch=self.public.epoch + 1))

    def line(self) -> str:
        """As in the builder's file."""
        return f"ed25519-private {self.private}{self.public.options()}"


@dataclass(frozen=True, slots=True)
class TrustedKeys:
    """Public keys by id, and the ids of revoked ones."""

    keys: dict[str, PublicKey]
    revoked: frozenset[str] = frozenset()

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        """The `Trust` of a signed layer."""
        if signature is None:
            return "it is not signed"
        if (parts := _SIGNATURE.fullmatch(signature)) is None:
            return "its signature is not one of Ed25519"
        if reason := self.revokes(manifest, signature):
            return reason
        key = self.keys.get(parts[1])
        if key is None:
            return f"it is signed with key {parts[1]}, which is not trusted here"
        if key.expired:
            return f"key {key.id} {key.name} expired on {key.expires}"
        if not _is_signed(manifest, key, int(parts[2]), bytes.fromhex(parts[3])):
            return f"its signature is not that of key {key.id}"
        return None

    def revokes(self, manifest: Manifest, signature: str | None) -> str | None:
        """The `Trust` of a private directory: only what was revoked is refused."""
        parts = _SIGNATURE.fullmatch(signature or "")
        if parts is None:
            return None
        if parts[1] in self.revoked:
            return f"key {parts[1]} is revoked"
        key = self.keys.get(parts[1])
        if key is not None and int(parts[2]) < key.epoch:
            return f"it was signed in epoch {int(parts[2])}, before {key.epoch} of key {key.id}"
        return None


def pinned(digests: Collection[str]) -> Trust:
    """Trust exactly the entries whose `Entry.digest` the operator lists."""

    def trust(manifest: Manifest, signature: str | None) -> str | None:
        return None if manifest.digest in digests else f"{manifest.digest} is not pinned"

    return trust


def trust_all(manifest: Manifest, signature: str | None) -> None:
    """Trust every entry: an explicit opt-in, for layers that no other user can write to."""


def signing_key() -> SigningKey | None:
    """The builder's key in PIECEGRAPH_CACHE_SIGNING_KEY_FILE, if set; raises InvalidKeyFile."""
    path = read(SIGNING_KEY_FILE)
    return read_signing_key(Path(path)) if path else None


def read_signing_key(path: Path) -> SigningKey:
    """Raises InvalidKeyFile, also if others can read the file or the key has expired."""
    content, mode = _content(path)
    if mode & OTHERS_ANY:
        raise InvalidKeyFile(path=path, reason="others can read it (run chmod 600 on it)")
    words = [line for line in _lines(path, content) if line[0] == "ed25519-private"]
    if len(words) != 1:
        raise InvalidKeyFile(path=path, reason=f"it holds {len(words)} private keys")
    key = SigningKey.of(words[0][1], **words[0][2])
    if key.public.expired:
        raise InvalidKeyFile(path=path, reason=f"the key expired on {key.public.expires}")
    return key


def trusted_keys(own: SigningKey | None) -> TrustedKeys | None:
    """Those in PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE, and the `own` one; None if there are none.

    Raises InvalidKeyFile, also if others can change the file.
    """
    path = read(TRUSTED_KEYS_FILE)
    if not path:
        return TrustedKeys({own.public.id: own.public}) if own else None
    trusted = read_trusted_keys(Path(path))
    return replace(trusted, keys=trusted.keys | {own.public.id: own.public}) if own else trusted


def write_keys(key: SigningKey, path: Path) -> None:
    """Write the builder's file, and the line for servers to `path` with `.pub`."""
    checked_name(key.public.name or "key", "key")
    path = Path(os.path.realpath(path))
    with owned_directory(path.parent) as scratch:
        for name, line, mode in (
            (path.name, key.line(), 0o600),
            (f"{path.name}.pub", key.public.line(), 0o644),
        ):
            write_synced(scratch / name, [line.encode() + b"\n"], mode)
            place(scratch / name, path.with_name(name))


def read_trusted_keys(path: Path) -> TrustedKeys:
    """Raises InvalidKeyFile, also if others can change the file."""
    content, _ = _content(path)
    try:
        check_writers(Path(os.path.realpath(path)))
    except UntrustedDirectory as error:
        reason = f"{error.facts['problem']} (run {error.facts['command']})"
        raise InvalidKeyFile(path=path, reason=reason) from error
    keys: dict[str, PublicKey] = {}
    revoked = set()
    for kind, value, facts in _lines(path, content):
        key = PublicKey(value, **facts)
        if kind == "revoked":
            revoked |= {value, key.id}
        elif kind == "ed25519" and key.id not in keys:
            keys[key.id] = key
        else:
            fault = f"key {key.id} twice" if kind == "ed25519" else "a private key"
            raise InvalidKeyFile(path=path, reason=f"it holds {fault}")
    return TrustedKeys(keys, frozenset(revoked))


def _content(path: Path) -> tuple[str, int]:
    if importlib.util.find_spec("cryptography") is None:
        reason = "the package cryptography is missing (pip install piecegraph[trust])"
        raise InvalidKeyFile(path=path, reason=reason)
    try:
        mode = path.stat().st_mode
        content = read_file(Path(os.path.realpath(path)), _MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidKeyFile(path=path, reason=error.strerror) from error
    return content.decode(errors="replace"), mode


def _lines(path: Path, content: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The kind, value and options of each line that is not empty and no comment."""
    for number, line in enumerate(content.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        kind, value, *options = words if len(words) > 1 else (*words, "")
        try:
            short = kind == "revoked" and re.fullmatch("[0-9a-f]{16}", value)
            if kind not in ("ed25519", "ed25519-private", "revoked"):
                raise ValueError(f"unknown word {kind}")
            if not short and not _VALUE.fullmatch(value):
                raise ValueError("a key has 64 hexadecimal digits")
            yield kind, value, dict(_option(option) for option in options)
        except ValueError as error:
            raise InvalidKeyFile(path=path, reason=f"line {number}: {error}") from error


def _option(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    match name:
        case "name":
            return name, value
        case "expires":
            return name, date.fromisoformat(value)
        case "epoch":
            return name, int(value)
    raise ValueError(f"unknown option {text}")


def _signed_bytes(manifest: Manifest, epoch: int) -> bytes:
    return _DOMAIN + f"{epoch}\n".encode() + manifest.line()


def _is_signed(manifest: Manifest, key: PublicKey, epoch: int, signature: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(key.value))
    try:
        public.verify(signature, _signed_bytes(manifest, epoch))
    except InvalidSignature:
        return False
    return True


def _private(value: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    return Ed25519PrivateKey.from_private_bytes(bytes.fromhex(value))
