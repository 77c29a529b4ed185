"""A cache layer on a file system of fsspec: s3, gcs, http and others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..errors import LayerFailed
from .layers import Failures
from .manifest import BlobRef, Manifest, encode
from .names import blob_name, entry_name
from .signing import Trust, sign


class RemoteLayer:
    """Entries under `url`, trusted as `trust` says.

    With `write_back` entries are published there too, signed if there is a `secret`. Names that the
    remote lacks are remembered for `memory_seconds`, and after a failure no request is made for as
    long. On a file system without atomic puts, half-written entries are misses.
    """

    def __init__(
        self,
        url: str,
        trust: Trust,
        *,
        write_back: bool = False,
        secret: bytes | None = None,
        failures: Failures = "ignore",
        memory_seconds: float = 300.0,
    ) -> None:
        """Raises LayerFailed if fsspec or the file system's package is not installed."""
        try:
            from fsspec.core import url_to_fs

            self._files, self._base = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise LayerFailed(layer=url, reason=f"{error} (see the extra `remote`)") from error
        self.name = f"remote:{url}"
        self.failures: Failures = failures
        self.writable = write_back
        self._trust = trust
        self._secret = secret
        self._memory_seconds = memory_seconds
        self._lacks: dict[str, float] = {}
        self._down_until = 0.0

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        return self._trust(manifest, signature)

    def read(self, name: str, limit: int) -> bytes:
        if limit == 0:
            return b""  # some stores refuse an empty range; the caller checks the digest
        if time.monotonic() < self._lacks.get(name, 0.0):
            raise FileNotFoundError(name)
        content: bytes = self._call("cat_file", f"{self._base}/{name}", start=0, end=limit + 1)
        return content

    def store(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        for name, content in contents.items():
            ref = manifest.blobs[name]
            if not self._holds(ref):
                self._put(blob_name(ref.sha256), content)
        signature = sign(manifest, self._secret) if self._secret is not None else None
        self._put(entry_name(manifest.kind, manifest.key.digest), encode(manifest, signature))

    def _holds(self, ref: BlobRef) -> bool:
        try:
            size: int = self._call("size", f"{self._base}/{blob_name(ref.sha256)}")
        except FileNotFoundError:
            return False
        return size == ref.size

    def _put(self, name: str, content: bytes) -> None:
        path = f"{self._base}/{name}"
        self._call("makedirs", path.rpartition("/")[0], exist_ok=True)
        self._call("pipe_file", path, content)
        self._lacks.pop(name, None)

    def _call(self, verb: str, path: str, *args: Any, **options: Any) -> Any:
        """One request; any exception becomes an OSError and suspends requests for a while."""
        now = time.monotonic()
        if now < self._down_until:
            raise ConnectionError(f"{self.name} failed less than {self._memory_seconds:g} s ago")
        try:
            return getattr(self._files, verb)(path, *args, **options)
        except FileNotFoundError:
            self._lacks[path.removeprefix(f"{self._base}/")] = now + self._memory_seconds
            raise
        except Exception as error:
            self._down_until = now + self._memory_seconds
            raise OSError(f"{type(error).__name__}: {error}") from error
