"""Files that survive: whole or absent after a crash, and read without trusting what lies there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

Fault = Callable[[str], None]
"""Called with the name of each step of a publish; tests hand one over that kills the process."""


def no_fault(step: str) -> None:
    """The fault hook of production."""


class Irregular(OSError):
    """What lies at a name of the cache is a link, a device, a pipe or too large."""

    def __str__(self) -> str:
        return str(self.strerror)


def read_file(path: Path, limit: int) -> bytes:
    """The content of a regular file of at most `limit` bytes.

    Raises OSError. A symbolic link is not followed and a pipe is not waited for: Irregular.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink():
            raise Irregular(error.errno, "is a symbolic link", str(path)) from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Irregular(0, "is not a regular file", str(path))
        if status.st_size > limit:
            raise Irregular(0, f"has {status.st_size} bytes, more than {limit}", str(path))
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(descriptor)


def make_private(directory: Path) -> None:
    """Create `directory` and what is missing above it, each open to its owner alone."""
    if directory.is_dir():
        return
    make_private(directory.parent)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        sync_directory(directory.parent)


def write_synced(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file and force it to the disk; FileExistsError if it exists.

    `mode` without what the umask forbids: by default it is its owner's alone.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with open(descriptor, "wb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(descriptor)


def place(temporary: Path, final: Path) -> None:
    """Rename `temporary` to `final` in one step and force the new name to the disk."""
    make_private(final.parent)
    os.replace(temporary, final)
    sync_directory(final.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
