"""Who may have written what is about to be loaded as code.

A private directory is trusted because nobody else can write to it: it is ours, closed to others,
and no directory above it lets others put another in its place. Shared layers are trusted by
signature, by pinned digests or because the operator says so: see signing.py.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
from pathlib import Path

from ..errors import UntrustedDirectory

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
OTHERS_ANY = stat.S_IRWXG | stat.S_IRWXO


def check_private(directory: Path) -> None:
    """Raises UntrustedDirectory, with the command that mends it, unless `directory` is private.

    Private: owned by this process's user with mode 0700 or less, and every directory above it
    owned by this user or root and not writable by others unless sticky, as OpenSSH demands of
    `~/.ssh`. It has to be resolved: links on the way to it are for the caller to follow, once.
    Raises OSError when it cannot be examined.
    """
    _check_itself(directory)
    for ancestor in directory.parents:
        _check_ancestor(ancestor)


def _check_itself(directory: Path) -> None:
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory))
    if status.st_uid != os.geteuid():
        raise _untrusted(directory, f"user {status.st_uid} owns it", f"chown {os.geteuid()}")
    if status.st_mode & OTHERS_ANY:
        mode = stat.S_IMODE(status.st_mode)
        raise _untrusted(directory, f"its mode {mode:04o} lets others in", "chmod 700")


def _check_ancestor(directory: Path) -> None:
    status = directory.stat()
    if status.st_uid not in (0, os.geteuid()):
        problem = f"user {status.st_uid} owns {directory} above it"
        raise _untrusted(directory, problem, f"chown {os.geteuid()}")
    if status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX:
        raise _untrusted(directory, f"others can write to {directory} above it", "chmod go-w")


def _untrusted(directory: Path, problem: str, command: str) -> UntrustedDirectory:
    return UntrustedDirectory(
        path=directory, problem=problem, command=f"{command} {shlex.quote(str(directory))}"
    )
