"""File operations that survive a crash, and reads that do not trust what is on the disk.

A private directory is trusted because no other user can write to it: this user owns it, its mode
excludes others, and no directory above it lets others replace it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Iterable
from pathlib import Path

from ..errors import UntrustedDirectory

OTHERS_ANY = stat.S_IRWXG | stat.S_IRWXO
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Irregular(OSError):
    """The file at this name is a link, a device, a pipe or too large."""

    def __str__(self) -> str:
        return str(self.strerror)


def open_regular(path: Path, limit: int) -> tuple[int, int]:
    """A descriptor for reading a regular file of at most `limit` bytes, and its size.

    Raises OSError. Symbolic links are not followed and pipes are not waited for: Irregular.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise Irregular(error.errno, "is a symbolic link", str(path)) from None
        raise
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_size <= limit:
        return descriptor, status.st_size
    os.close(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise Irregular(0, "is not a regular file", str(path))
    raise Irregular(0, f"has {status.st_size} bytes, more than {limit}", str(path))


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises as `open_regular`."""
    descriptor, _ = open_regular(path, limit)
    with open(descriptor, "rb", buffering=0) as file:
        return file.readall()


def make_directory(directory: Path) -> None:
    """Create `directory` and its missing parents, accessible to the owner only."""
    if directory.is_dir():
        return
    make_directory(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        sync_directory(directory.parent)


def write_synced(path: Path, parts: Iterable[bytes], mode: int = 0o600) -> None:
    """Write a new file and fsync it; FileExistsError if it exists. The umask applies to `mode`."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb", buffering=0) as file:
        for part in parts:
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        os.fsync(descriptor)


def place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final` atomically and fsync the directory, created if missing."""
    make_directory(final.parent)
    os.replace(temporary, final)
    sync_directory(final.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_private(directory: Path) -> None:
    """Raise UntrustedDirectory, with the command that fixes it, unless `directory` is private.

    Private: owned by this process's user with mode 0700 or less, and every directory above it
    owned by this user or root and not writable by others unless sticky, as OpenSSH requires of
    `~/.ssh`. The caller resolves symbolic links first. Raises OSError if it cannot be examined.
    """
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if status.st_uid != os.geteuid():
        raise _untrusted(directory, f"user {status.st_uid} owns it", f"chown {os.geteuid()}")
    if status.st_mode & OTHERS_ANY:
        mode = stat.S_IMODE(status.st_mode)
        raise _untrusted(directory, f"its mode {mode:04o} gives access to others", "chmod 700")
    check_writers(directory.parent, " above it")


def check_writers(path: Path, where: str = "") -> None:
    """Raise UntrustedDirectory if another user than root can change `path` or replace it.

    The caller resolves symbolic links first. Raises OSError if it cannot be examined.
    """
    for place in (path, *path.parents):
        status = place.stat()
        if status.st_uid not in (0, os.geteuid()):
            problem = f"user {status.st_uid} owns {place}{where}"
            raise _untrusted(place, problem, f"chown {os.geteuid()}")
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_mode & _OTHERS_WRITE and not sticky:
            raise _untrusted(place, f"others can write to {place}{where}", "chmod go-w")


def _untrusted(directory: Path, problem: str, command: str) -> UntrustedDirectory:
    return UntrustedDirectory(
        path=directory, problem=problem, command=f"{command} {shlex.quote(str(directory))}"
    )
