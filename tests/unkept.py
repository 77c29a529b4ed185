"""Caches that keep nothing, also for a process that runs as root."""

import errno

from piecegraph.cache.directory import DirectoryLayer
from piecegraph.errors import CacheNotWritable
from piecegraph.runtime.setup import open_cache

UNKEPT = {
    "off": "it is off",
    "unusable": "Not a directory",
    "only read": "Read-only file system",
    "full": "No space left on device",
}
"""Why, by kind of cache."""


def settings_that_keep_nothing(kind, tmp_path, monkeypatch):
    """The settings of such a cache, after what the file system does to it."""
    if kind == "off":
        return {"cache": False}
    root = tmp_path / kind
    root.mkdir(mode=0o700)
    if kind == "unusable":
        (root / "file").write_text("")
        return {"cache_dir": root / "file" / "cache"}
    monkeypatch.setattr(*_only_read() if kind == "only read" else _full())
    return {"cache_dir": root}


def _only_read():
    def private_directory(root, trust):
        raise CacheNotWritable(path=root, reason=UNKEPT["only read"])

    return open_cache, "private_directory", private_directory


def _full():
    def store(layer, entry):
        raise OSError(errno.ENOSPC, UNKEPT["full"])

    return DirectoryLayer, "store", store
