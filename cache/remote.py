"""A cache layer on a file system of fsspec: s3, gcs, http and others."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from ..errors import LayerFailed
from .files import write_synced
from .layers import Entry, Failures, Miss
from .manifest import BlobRef, Manifest, encode
from .names import ENTRY_AREA, SCRATCH_AREA, blob_name, entry_name
from .signing import SigningKey, Trust

LISTED = 32
"""Most entries that are compared with a key that the remote lacks: each takes a request."""

ABSENT = (404, 410)
"""What a server answers for a file that it does not have."""

LEASE_REQUEST_SECONDS = 15.0
"""Most seconds of a request for a lease."""


@dataclass(frozen=True, slots=True)
class RemoteSeconds:
    """The times of a remote layer, which limit what a slow one adds to a start."""

    memory: float = 300.0
    """Names that the remote lacks are remembered; after a failure no request is made."""

    request: float = 60.0
    """The most that one request may take."""

    total: float = 300.0
    """The most that all requests may take together. A layer is opened once per start."""


class RemoteLayer:
    """Entries under `url`, trusted as `trust` says.

    With `write_back` entries are published there too, signed by `signer`; without one they keep the
    signature that they have. On a file system without atomic puts, half-written entries are misses.

    Requests for leases (`look`, `create`, `overwrite`, `remove`) have a clock of their own: they
    are made also after a failure, spend nothing of the total, and their failures suspend nothing.
    """

    def __init__(
        self,
        url: str,
        trust: Trust,
        *,
        write_back: bool = False,
        signer: SigningKey | None = None,
        failures: Failures = "ignore",
        seconds: RemoteSeconds | None = None,
    ) -> None:
        """Raises LayerFailed if fsspec or the file system's package is not installed."""
        try:
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self._files, self._base = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise LayerFailed(layer=url, reason=f"{error} (see the extra `remote`)") from error
        self._is_local = isinstance(self._files, LocalFileSystem)
        self.name = f"remote:{url}"
        self.failures: Failures = failures
        self.writable = write_back
        self.refuses = trust
        self._signer = signer
        self._seconds = seconds or RemoteSeconds()
        self._seconds_left = self._seconds.total
        self._is_http = url.startswith(("http://", "https://"))
        self._lacks: dict[str, float] = {}
        self._down_until = 0.0
        self.leased: set[str] = set()  # entries that this process alone makes now

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
        if not self._is_http:
            return self._files.cat_file(path, start=0, end=size)
        # some servers ignore ranges
        with self._files.open(path, "rb") as file:
            return file.read(size)

    def store(self, entry: Entry) -> None:
        manifest = entry.manifest
        signature = self._signer.sign(manifest) if self._signer else entry.signature
        if reason := self.refuses(manifest, signature):
            raise PermissionError(f"its readers would refuse the entry: {reason}")
        name = entry_name(manifest.kind, manifest.key.digest)
        if name in self.leased:
            self._down_until = 0.0  # other machines wait for it
        for blob, content in entry.contents.items():
            ref = manifest.blobs[blob]
            if not self._holds(ref):
                self._write(blob_name(ref.sha256), content)
        self._write(name, encode(manifest, signature))

    def is_whole(self, there: Manifest | Miss) -> bool:
        """Whether all blobs of an entry are there; also if that cannot be seen."""
        if isinstance(there, Miss):
            return there.reason == "unreadable"
        with contextlib.suppress(OSError):
            return all(self._holds(ref) for ref in there.blobs.values())
        return True

    def _holds(self, ref: BlobRef) -> bool:
        try:
            size: int = self._call(blob_name(ref.sha256), lambda path: self._files.size(path))
        except FileNotFoundError:
            return False
        return size == ref.size

    def _write(self, name: str, content: bytes) -> None:
        """At once: who reads meanwhile finds all of a file, or none."""

        def write(path: str) -> None:
            if not self._is_local:
                self._put(path, lambda: self._files.pipe_file(path, content))
                return
            # fsspec would write in place; what lies beside an entry would be listed as one
            part = f"{self._base}/{SCRATCH_AREA}/{uuid4().hex}"
            try:
                self._put(part, lambda: write_synced(Path(part), [content], 0o666))
                self._put(path, lambda: os.replace(part, path))
            finally:
                Path(part).unlink(missing_ok=True)

        self._call(name, write)
        self._lacks.pop(name, None)

    def _put(self, path: str, write: Callable[[], None]) -> None:
        """Object stores have no directories: they are made where a write fails without."""
        try:
            write()
        except FileNotFoundError:
            self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
            write()

    def look(self, name: str, limit: int) -> bytes | None:
        """The first bytes of a file, also where it was missing before; None if it is missing."""
        self._lacks.pop(name, None)
        try:
            content: bytes = self._ask(name, lambda path: self._fetch(path, limit))
        except FileNotFoundError:
            return None
        return content

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that must not exist; whether it did not.

        S3 and Google Cloud Storage decide that in one request, and so does a directory.
        """

        def write(path: str) -> None:
            if self._is_local:  # fsspec would look and then write
                self._put(path, lambda: write_synced(Path(path), [content]))
            else:
                self._put(path, lambda: self._files.pipe_file(path, content, mode="create"))

        try:
            self._ask(name, write)
        except FileExistsError:
            return False
        return True

    def overwrite(self, name: str, content: bytes) -> None:
        self._ask(name, lambda path: self._files.pipe_file(path, content))

    def remove(self, name: str) -> None:
        self._ask(name, lambda path: self._files.rm_file(path))

    def _ask(
        self, name: str, request: Callable[[str], Any], limit: float = LEASE_REQUEST_SECONDS
    ) -> Any:
        """One request on its own clock; any exception becomes an OSError."""
        limit = min(self._seconds.request, limit)
        try:
            return _within(limit, lambda: request(f"{self._base}/{name}"))
        except FileExistsError:
            raise
        except FileNotFoundError as error:
            cause = error.__cause__
            is_absent = cause is None or isinstance(cause, FileNotFoundError)
            # fsspec raises that for each failure of an http server, and for a bucket
            failed = self._is_http and getattr(cause, "status", None) not in ABSENT
            if not is_absent and (failed or type(cause).__name__ == "NoSuchBucket"):
                raise OSError(f"{type(cause).__name__}: {cause}") from error
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {error}") from error

    def _call(self, name: str, request: Callable[[str], Any]) -> Any:
        """One request within the time of all; an OSError suspends them for a while."""
        began = time.monotonic()
        if began < self._down_until:
            raise ConnectionError(f"{self.name} failed less than {self._seconds.memory:g} s ago")
        if self._seconds_left <= 0:
            raise TimeoutError(f"all requests have taken {self._seconds.total:g} s")
        try:
            return self._ask(name, request, self._seconds_left)
        except FileNotFoundError:
            self._lacks[name] = began + self._seconds.memory
            raise
        except OSError:
            self._down_until = time.monotonic() + self._seconds.memory
            raise
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
