"""The private local directory: the layer this process writes to and trusts.

Blobs come first, each written to a private temporary file, forced to the disk and renamed to its
sha256; the manifest that names them comes last, by one rename. A reader therefore sees a whole
entry or none, whoever dies when. Nothing is truncated, and nothing is listed in order to read.

Made for any number of processes of one machine. On a network file system entries stay whole, since
all of it rests on rename and on digests, but what one machine publishes may be a miss on another
for a while, and without locks work may be done twice: better give it as a shared layer.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from ..errors import CacheNotWritable
from .entries import is_intact
from .files import Fault, make_private, no_fault, place, read_file, write_synced
from .layers import Failures
from .manifest import BlobRef, Manifest, encode
from .names import QUARANTINE_AREA, SCRATCH_AREA, blob_name, entry_name
from .trust import check_private

USE_RESOLUTION = 60.0
"""Seconds between two records of an entry's use: spares a write per look-up."""


class PrivateDirectory:
    """A directory of this user alone. `fault` is called at each step of a publish (for tests)."""

    name = "private"
    failures: Failures = "ignore"
    writable = True

    def __init__(self, root: Path, fault: Fault = no_fault) -> None:
        """Create what is missing; raises UntrustedDirectory or CacheNotWritable.

        Links on the way are followed now and never again: who re-points one later is too late.
        """
        self._fault = fault
        try:
            self.root = Path(os.path.realpath(root))
            make_private(self.root / SCRATCH_AREA)
            check_private(self.root)
            with self._scratch():
                pass
        except OSError as error:
            raise CacheNotWritable(path=root, reason=error.strerror or error) from error

    def read(self, name: str, limit: int) -> bytes:
        return read_file(self.root / name, limit)

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        return None

    def store(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        """Publish an entry; raises OSError, and what readers find then is whole or a miss."""
        blobs = {manifest.blobs[name]: content for name, content in contents.items()}
        with self._scratch() as scratch:
            for ref, content in blobs.items():
                if self.file(ref, content) is None:
                    self._put_blob(scratch, ref, content)
            temporary = scratch / "manifest"
            write_synced(temporary, encode(manifest))
            self._fault("manifest written")
            place(temporary, self.root / entry_name(manifest.kind, manifest.key.digest))
            self._fault("manifest placed")
            # An eviction that did not see the manifest yet may have taken a blob we re-used.
            for ref, content in blobs.items():
                try:
                    os.utime(self.root / blob_name(ref.sha256))
                except FileNotFoundError:
                    self._put_blob(scratch, ref, content)
        self._fault("done")

    def _put_blob(self, scratch: Path, ref: BlobRef, content: bytes) -> None:
        temporary = scratch / ref.sha256
        write_synced(temporary, content)
        self._fault("blob written")
        place(temporary, self.root / blob_name(ref.sha256))
        self._fault("blob placed")

    def file(self, ref: BlobRef, content: bytes) -> Path | None:
        """The file of a blob, safe from eviction for the time of grace.

        None unless it is here with the right content: damage is no reason not to write it again.
        """
        path = self.root / blob_name(ref.sha256)
        try:
            if read_file(path, ref.size) != content:
                return None
            os.utime(path)
        except OSError:
            return None
        return path

    def used(self, manifest: Manifest) -> None:
        """Record, once a minute, that an entry was of use; eviction goes by it."""
        path = self.root / entry_name(manifest.kind, manifest.key.digest)
        with contextlib.suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > USE_RESOLUTION:
                os.utime(path)

    def quarantine(self, name: str, reason: str) -> bool:
        """Move a damaged file out of the way, with the reason beside it; raises OSError.

        False if another process has done so, or has put a good file there, which is put back.
        """
        quarantine = self.root / QUARANTINE_AREA
        make_private(quarantine)
        kept = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-"), dir=quarantine))
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.root / name, kept / "file")
            if is_intact(name, kept / "file"):
                place(kept / "file", self.root / name)
        if not os.path.lexists(kept / "file"):
            kept.rmdir()
            return False
        (kept / "reason.json").write_text(json.dumps({"name": name, "reason": reason}))
        return True

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A directory of this writer alone; failing to remove it again is no failure."""
        area = self.root / SCRATCH_AREA
        area.mkdir(mode=0o700, exist_ok=True)  # fails if the root has vanished
        scratch = Path(tempfile.mkdtemp(dir=area))
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
