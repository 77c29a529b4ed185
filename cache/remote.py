"""A cache layer on a file system of fsspec: s3, gcs, http and others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import LayerFailed
from .layers import Entry, Failures
from .manifest import BlobRef, Manifest, encode
from .names import ENTRY_AREA, blob_name, entry_name
from .signing import SigningKey, Trust

LISTED = 32
"""Most entries that are compared with a key that the remote lacks: each takes a request."""


class RemoteLayer:
    """Entries under `url`, trusted as `trust` says.

    With `write_back` entries are published there too, signed by `signer`; without one they keep the
    signature that they have. Names that the remote lacks are remembered for `memory_seconds`, and
    after a failure no request is made for as long. On a file system without atomic puts,
    half-written entries are misses.

    A request may take `request_seconds` and all requests together `total_seconds`; a layer is
    opened once per start, so this limits what a slow remote adds to it.
    """

    def __init__(
        self,
        url: str,
        trust: Trust,
        *,
        write_back: bool = False,
        signer: SigningKey | None = None,
        failures: Failures = "ignore",
        memory_seconds: float = 300.0,
        request_seconds: float = 60.0,
        total_seconds: float = 300.0,
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
        self._signer = signer
        self._memory_seconds = memory_seconds
        self._request_seconds = request_seconds
        self._total_seconds = total_seconds
        self._seconds_left = total_seconds
        self._ignores_ranges = url.startswith(("http://", "https://"))  # some servers do
        self._lacks: dict[str, float] = {}
        self._down_until = 0.0

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        return self._trust(manifest, signature)

    def read(self, name: str, limit: int) -> bytes:
        if limit == 0:
            return b""  # some stores refuse an empty range; the caller checks the digest
        if time.monotonic() < self._lacks.get(name, 0.0):
            raise FileNotFoundError(name)
        content: bytes = self._call(name, lambda path: self._fetch(path, limit + 1))
        return content

    def entries(self, kind: str) -> list[str]:
        files = self._call(f"{ENTRY_AREA}/{kind}", lambda path: self._files.find(path, detail=True))

        def written(path: str) -> str:
            times = ("LastModified", "mtime", "updated", "created")  # by file system
            return str(next((files[path][name] for name in times if name in files[path]), ""))

        newest = sorted(files, key=written, reverse=True)[:LISTED]
        return ["/".join(path.split("/")[-4:]) for path in newest]

    def _fetch(self, path: str, size: int) -> Any:
        """The first `size` bytes, without receiving much more."""
        if not self._ignores_ranges:
            return self._files.cat_file(path, start=0, end=size)
        with self._files.open(path, "rb") as file:
            return file.read(size)

    def store(self, entry: Entry) -> None:
        manifest = entry.manifest
        signature = self._signer.sign(manifest) if self._signer else entry.signature
        if reason := self._trust(manifest, signature):
            raise PermissionError(f"its readers would refuse the entry: {reason}")
        for name, content in entry.contents.items():
            ref = manifest.blobs[name]
            if not self._holds(ref):
                self.replace(blob_name(ref.sha256), content)
        self.replace(entry_name(manifest.kind, manifest.key.digest), encode(manifest, signature))

    def _holds(self, ref: BlobRef) -> bool:
        try:
            size: int = self._call(blob_name(ref.sha256), lambda path: self._files.size(path))
        except FileNotFoundError:
            return False
        return size == ref.size

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not exist; whether it did not. S3 decides that in one request."""
        try:
            self.replace(name, content, mode="create")
        except FileExistsError:
            return False
        return True

    def replace(self, name: str, content: bytes, mode: str = "overwrite") -> None:
        """Write a file. Raises OSError."""

        def put(path: str) -> None:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._files.pipe_file(path, content, mode=mode)

        self._call(name, put)
        self._lacks.pop(name, None)

    def read_again(self, name: str, limit: int) -> bytes:
        """As `read`, also where the file was missing before."""
        self._lacks.clear()
        return self.read(name, limit)

    def remove(self, name: str) -> None:
        """Remove a file. Raises OSError."""
        self._call(name, lambda path: self._files.rm_file(path))

    def _call(self, name: str, request: Callable[[str], Any]) -> Any:
        """One request; any exception becomes an OSError and suspends requests for a while."""
        began = time.monotonic()
        if began < self._down_until:
            raise ConnectionError(f"{self.name} failed less than {self._memory_seconds:g} s ago")
        if self._seconds_left <= 0:
            raise TimeoutError(f"all requests have taken {self._total_seconds:g} s")
        limit = min(self._request_seconds, self._seconds_left)
        try:
            return _within(limit, lambda: request(f"{self._base}/{name}"))
        except FileNotFoundError:
            self._lacks[name] = began + self._memory_seconds
            raise
        except FileExistsError:
            raise
        except Exception as error:
            self._down_until = time.monotonic() + self._memory_seconds
            raise OSError(f"{type(error).__name__}: {error}") from error
        finally:
            self._seconds_left -= time.monotonic() - began


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of `work`, or TimeoutError; its thread then runs until the request ends."""
    results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            results.put((work(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=run, name="piecegraph-remote", daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if error is not None:
        raise error
    return result
