"""A directory as a cache layer: the private one, which is read and written, or a shared one.

Publishing writes the blobs first, each to a temporary file that is synced and renamed to its
sha256, and then the manifest that names them, by one rename. A reader sees a whole entry or none,
even if a process dies. Files are never truncated, and a lookup never lists a directory.

The private directory supports any number of processes on one machine. On a network file system
entries stay whole, since this relies on rename and digests only, but an entry that one machine
publishes may be a miss on another for a while, and without locks work may be done twice. Use it
as a shared layer instead.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import time
from pathlib import Path

from ..errors import CacheNotWritable
from .files import check_private, make_directory, place, read_file, write_synced
from .keys.environment import CACHE_DIR, read
from .layers import Entry, Failures
from .lock import owned_directory
from .manifest import BlobRef, Manifest, encode, is_intact
from .names import QUARANTINE_AREA, SCRATCH_AREA, blob_name, entry_name, entry_names
from .signing import Trust, trust_all

USE_RESOLUTION = 60.0
"""Seconds between two records of an entry's use: saves a write per lookup."""


class DirectoryLayer:
    """Entries under `root`, trusted as `trust` says; read-only unless `writable`.

    A hit in a shared directory is copied to the private one and loaded from there, so that no
    other user can replace a file between its verification and its use.
    """

    def __init__(
        self,
        root: Path,
        trust: Trust = trust_all,
        *,
        name: str | None = None,
        failures: Failures = "ignore",
        writable: bool = False,
    ) -> None:
        self.root = root
        self.name = name or f"shared:{root}"
        self.failures: Failures = failures
        self.writable = writable
        self.refuses = trust

    def read(self, name: str, limit: int) -> bytes:
        try:
            return read_file(self.root / name, limit)
        except FileNotFoundError:
            if self.root.is_dir():
                raise
            # a volume that is not mounted, or another name, lacks no entry
            reason = "there is no such directory"
            raise NotADirectoryError(errno.ENOTDIR, reason, str(self.root)) from None

    def entries(self, kind: str) -> list[str]:
        names = (name for name in entry_names(self.root) if name.split("/")[1] == kind)
        return sorted(names, key=self._last_use, reverse=True)

    def _last_use(self, name: str) -> float:
        with contextlib.suppress(OSError):
            return (self.root / name).stat().st_mtime
        return 0.0

    def store(self, entry: Entry) -> None:
        """Publish an entry; raises OSError, after which a reader finds a whole entry or a miss."""
        manifest = entry.manifest
        blobs = {manifest.blobs[name]: content for name, content in entry.contents.items()}
        area = self.root / SCRATCH_AREA
        area.mkdir(mode=0o700, exist_ok=True)  # fails if the root has been removed
        with owned_directory(area) as scratch:
            for ref, content in blobs.items():
                if self.file(ref, content) is None:
                    self._put_blob(scratch, ref, content)
            name = entry_name(manifest.kind, manifest.key.digest)
            self._put(scratch / "manifest", encode(manifest, entry.signature), name)
            # An eviction that did not see the manifest yet may have removed a blob we reused.
            for ref, content in blobs.items():
                try:
                    os.utime(self.root / blob_name(ref.sha256))
                except FileNotFoundError:
                    self._put_blob(scratch, ref, content)

    def _put_blob(self, scratch: Path, ref: BlobRef, content: bytes) -> None:
        self._put(scratch / "blob", content, blob_name(ref.sha256))

    def _put(self, temporary: Path, content: bytes, name: str) -> None:
        write_synced(temporary, [content])
        place(temporary, self.root / name)

    def file(self, ref: BlobRef, content: bytes) -> Path | None:
        """The file of a blob; touching it protects it from eviction for the grace period.

        None if it is missing or has other bytes, so that a publish replaces a damaged blob.
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
        """Record, at most once a minute, that an entry was used; eviction depends on it."""
        path = self.root / entry_name(manifest.kind, manifest.key.digest)
        with contextlib.suppress(OSError):
            if abs(time.time() - path.stat().st_mtime) > USE_RESOLUTION:
                os.utime(path)

    def quarantine(self, name: str, reason: str, *, intact: bool = False) -> bool:
        """Move a damaged file away, with the reason beside it; raises OSError.

        False if another process has moved it. If another process has replaced it with a good file,
        the file is put back, unless an `intact` one is to be moved.
        """
        quarantine = self.root / QUARANTINE_AREA
        make_directory(quarantine)
        kept = Path(tempfile.mkdtemp(prefix=time.strftime("%Y%m%d-"), dir=quarantine))
        with contextlib.suppress(FileNotFoundError):
            os.replace(self.root / name, kept / "file")
            if not intact and is_intact(name, kept / "file"):
                place(kept / "file", self.root / name)
        if not os.path.lexists(kept / "file"):
            kept.rmdir()
            return False
        (kept / "reason.json").write_text(json.dumps({"name": name, "reason": reason}))
        return True


def private_root(named: Path | None = None) -> Path | None:
    """The private directory: `named`, that of the environment, or the user's default.

    None for a default or a `~` where the user has no home directory.
    """
    root = named or read(CACHE_DIR)
    try:
        if not root:
            import platformdirs

            root = platformdirs.user_cache_dir("piecegraph")
        return Path(root).expanduser()
    except RuntimeError:  # no HOME, and no entry in the password file
        return None


def private_directory(root: Path, trust: Trust = trust_all) -> DirectoryLayer:
    """The private directory at `root`, created if missing.

    Symbolic links are resolved once, here. Raises UntrustedDirectory or CacheNotWritable.
    """
    try:
        resolved = Path(os.path.realpath(root))
        make_directory(resolved / SCRATCH_AREA)
        check_private(resolved)
        with owned_directory(resolved / SCRATCH_AREA):
            pass
    except (OSError, ValueError) as error:  # no file can have a name with a NUL
        reason = getattr(error, "strerror", None) or error
        raise CacheNotWritable(path=root, reason=reason) from error
    return DirectoryLayer(resolved, trust, name="private", writable=True)


def read_only_directory(root: Path, trust: Trust = trust_all) -> DirectoryLayer | None:
    """The private directory at `root` for reading only; None if there is none.

    Raises UntrustedDirectory: a directory that cannot be written must be private as well.
    """
    try:
        resolved = Path(os.path.realpath(root))
        check_private(resolved)
    except (OSError, ValueError):
        return None
    return DirectoryLayer(resolved, trust, name="private")
