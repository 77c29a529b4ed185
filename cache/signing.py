"""Whose shared entries are believed: a signature, a pinned list of digests, or anybody's.

A signature is an HMAC-SHA256 over line 1 of the manifest, which names the kind, the key and the
sha256 of every blob: who signs it signs all of the entry. A hash stored beside a file shows damage
only; against an attacker the secret must lie elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import InvalidSecret
from .files import read_file
from .keys.environment import SIGNING_KEY, SIGNING_KEY_FILE, read
from .manifest import Manifest
from .trust import OTHERS_ANY

Trust = Callable[[Manifest, "str | None"], "str | None"]
"""Given a manifest and its signature: the reason to refuse it, or None."""

MIN_SECRET_BYTES = 16
_DOMAIN = b"piecegraph cache entry\n"


def sign(manifest: Manifest, secret: bytes) -> str:
    """The signature of an entry, in hex."""
    return hmac.new(secret, _DOMAIN + manifest.line(), hashlib.sha256).hexdigest()


def signed_with(secret: bytes) -> Trust:
    """Believe what was signed with `secret`."""

    def trust(manifest: Manifest, signature: str | None) -> str | None:
        if signature is None:
            return "it is not signed"
        if not hmac.compare_digest(signature, sign(manifest, secret)):
            return "it is signed with another key"
        return None

    return trust


def pinned(digests: Collection[str]) -> Trust:
    """Believe exactly the entries whose `Entry.digest` the operator has listed."""

    def trust(manifest: Manifest, signature: str | None) -> str | None:
        return None if manifest.digest in digests else f"{manifest.digest} is not pinned"

    return trust


def anybody(manifest: Manifest, signature: str | None) -> None:
    """Believe whatever lies there: the explicit opt-in for layers nobody else can write to."""


def secret_from_environment() -> bytes | None:
    """The secret in PIECEGRAPH_CACHE_SIGNING_KEY or the file named by ..._FILE, if one is set.

    Raises InvalidSecret if it is short, or if the file can be read by others.
    """
    if path := read(SIGNING_KEY_FILE):
        return _strong(_private_content(Path(path)))
    if text := read(SIGNING_KEY):
        return _strong(text.encode())
    return None


def _private_content(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        content = read_file(Path(os.path.realpath(path)), 1 << 16)
    except OSError as error:
        raise _invalid(f"{path}: {error.strerror}") from error
    if mode & OTHERS_ANY:
        raise _invalid(f"others can read {path} (chmod 600 it)")
    return content.strip()


def _strong(secret: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise _invalid(f"it has {len(secret)} bytes")
    return secret


def _invalid(reason: str) -> InvalidSecret:
    return InvalidSecret(reason=reason, variable=SIGNING_KEY, file_variable=SIGNING_KEY_FILE)
