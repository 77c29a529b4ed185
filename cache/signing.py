"""Which entries of a shared layer are trusted: signed ones, pinned ones, or all.

A signature is an HMAC-SHA256 over line 1 of the manifest, which holds the kind, the key and the
sha256 of every blob, so it covers the whole entry. A plain hash stored beside a file detects
damage but not an attacker; that takes a secret that is stored elsewhere.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Collection
from pathlib import Path

from ..errors import InvalidSecret
from .files import OTHERS_ANY, read_file
from .keys.environment import SIGNING_KEY, SIGNING_KEY_FILE, read
from .manifest import Manifest

Trust = Callable[[Manifest, "str | None"], "str | None"]
"""From a manifest and its signature: the reason to refuse the entry, or None."""

MIN_SECRET_BYTES = 16
_DOMAIN = b"piecegraph cache entry\n"


def sign(manifest: Manifest, secret: bytes) -> str:
    """The signature of an entry, in hex."""
    return hmac.new(secret, _DOMAIN + manifest.line(), hashlib.sha256).hexdigest()


def signed_with(secret: bytes) -> Trust:
    """Trust entries signed with `secret`."""

    def trust(manifest: Manifest, signature: str | None) -> str | None:
        if signature is None:
            return "it is not signed"
        if not hmac.compare_digest(signature, sign(manifest, secret)):
            return "it is signed with another key"
        return None

    return trust


def pinned(digests: Collection[str]) -> Trust:
    """Trust exactly the entries whose `Entry.digest` the operator lists."""

    def trust(manifest: Manifest, signature: str | None) -> str | None:
        return None if manifest.digest in digests else f"{manifest.digest} is not pinned"

    return trust


def trust_all(manifest: Manifest, signature: str | None) -> None:
    """Trust every entry: an explicit opt-in, for layers that no other user can write to."""


def secret_from_environment() -> bytes | None:
    """The secret in PIECEGRAPH_CACHE_SIGNING_KEY, or in the file that ..._FILE names, if set.

    Raises InvalidSecret if it is too short or if others can read the file.
    """
    if path := read(SIGNING_KEY_FILE):
        return _long_enough(_private_content(Path(path)))
    if text := read(SIGNING_KEY):
        return _long_enough(text.encode())
    return None


def _private_content(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        content = read_file(Path(os.path.realpath(path)), 1 << 16)
    except OSError as error:
        raise _invalid(f"{path}: {error.strerror}") from error
    if mode & OTHERS_ANY:
        raise _invalid(f"others can read {path} (run chmod 600 on it)")
    return content.strip()


def _long_enough(secret: bytes) -> bytes:
    if len(secret) < MIN_SECRET_BYTES:
        raise _invalid(f"it has {len(secret)} bytes")
    return secret


def _invalid(reason: str) -> InvalidSecret:
    return InvalidSecret(reason=reason, variable=SIGNING_KEY, file_variable=SIGNING_KEY_FILE)
