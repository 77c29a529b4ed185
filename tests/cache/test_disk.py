"""Disks fill up, disappear and return errors: one event is emitted and the process continues."""

import errno
import os
import resource
import shutil
import subprocess
import time

import pytest

from piecegraph.cache import Cache, Entry, Key, Miss
from piecegraph.cache import directory as directory_module
from piecegraph.cache.evict import Limits
from piecegraph.cache.lock import Flight
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA, blob_name
from piecegraph.errors import CacheNotWritable
from piecegraph.events import Events
from piecegraph.tools.cache_verify import verify

from .children import fork, status
from .conftest import BLOBS, META

LARGE = {"large": bytes(1 << 20)}
ROOT = os.geteuid() == 0


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 256 KiB, if the system allows mounting one."""
    mount = tmp_path / "disk"
    mount.mkdir(mode=0o700)
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(mount)]
    if shutil.which("mount") is None:
        pytest.skip("there is no mount")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def assert_serves(cache, events, key, blobs):
    """Publishing fails and the entry is usable; returns the reason in the event."""
    entry = cache.publish("artifact", key, META, blobs)
    for name, content in blobs.items():
        assert entry.contents[name] == content
        assert cache.path(entry, name).read_bytes() == content
    assert isinstance(cache.lookup("artifact", key), Miss)
    assert events.counters["cache.publish_failed"] == 1
    return str(events.named("cache.publish_failed")[0].facts["reason"])


def test_disk_full(small_disk, events, key):
    cache = Cache(small_disk / "cache", events)
    kept = Key.of("codegen", {"piece": "kept"})
    cache.publish("artifact", kept, META, BLOBS)

    assert "No space left" in assert_serves(cache, events, key, LARGE)

    assert isinstance(cache.lookup("artifact", kept), Entry)
    assert verify(small_disk / "cache") == []
    assert list((small_disk / "cache" / "tmp").iterdir()) == []


def test_disk_goes_read_only(small_disk, events, key):
    cache = Cache(small_disk / "cache", events)
    kept = Key.of("codegen", {"piece": "kept"})
    cache.publish("artifact", kept, META, BLOBS)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)

    assert "Read-only" in assert_serves(cache, events, key, BLOBS | {"more": b"x"})

    assert isinstance(cache.lookup("artifact", kept), Entry)
    with cache.single_flight("artifact", key) as flight:
        assert flight is Flight.UNLOCKED
    with pytest.raises(CacheNotWritable, match="Read-only"):
        Cache(small_disk / "cache", events)


def in_child(work):
    assert status(fork(work)) == 0


def test_file_size_limit_cuts_a_blob_short(root, key):
    def work():
        events = Events()
        cache = Cache(root, events)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        with pytest.raises(OSError, match="too large"):  # also the temporary file of `path`
            assert_serves(cache, events, key, LARGE)
        assert "too large" in events.named("cache.publish_failed")[0].facts["reason"]

    in_child(work)
    assert verify(root) == []
    assert list((root / "tmp").iterdir()) == []


def test_permission_is_taken_away(root, key):
    kept = Key.of("codegen", {"piece": "kept"})

    def work():
        events = Events()
        cache = Cache(root, events)
        cache.publish("artifact", kept, META, BLOBS)
        if ROOT:
            os.seteuid(65534)
        else:
            root.chmod(0)
        missed = cache.lookup("artifact", kept)
        assert missed.reason == "unreadable"
        assert "Permission denied" in missed.detail
        assert "Permission denied" in assert_serves(cache, events, key, BLOBS)
        with cache.single_flight("artifact", key) as flight:
            assert flight is Flight.UNLOCKED
        with pytest.raises(CacheNotWritable, match="Permission denied"):
            Cache(root, events)

    in_child(work)
    root.chmod(0o700)
    assert isinstance(Cache(root, Events()).lookup("artifact", kept), Entry)


def test_directory_vanishes(cache, root, events, key):
    shutil.rmtree(root)
    assert "No such file" in assert_serves(cache, events, key, BLOBS)
    with cache.single_flight("artifact", key) as flight:
        assert flight is Flight.UNLOCKED
    cache.evict()
    assert not root.exists(), "it may be an unmounted disk, so nothing is written in its place"


def test_directory_is_replaced_by_a_file(cache, root, events, key):
    shutil.rmtree(root)
    root.write_text("no directory")
    assert "Not a directory" in assert_serves(cache, events, key, BLOBS)
    with pytest.raises(CacheNotWritable):
        Cache(root, events)


def test_parts_of_the_directory_vanish(cache, root, key):
    for part in ("tmp", BLOB_AREA, ENTRY_AREA, "locks", "quarantine"):
        cache.publish("artifact", key, META, BLOBS)
        shutil.rmtree(root / part, ignore_errors=True)
        cache.publish("artifact", key, META, BLOBS)
        assert isinstance(cache.lookup("artifact", key), Entry), part


def test_clock_set_back(root, events, key):
    """Entries from the future are found, count as recent, and do not stay recent forever."""
    cache = Cache(root, events, limits=Limits(size=0, grace=60.0))
    cache.publish("artifact", key, META, BLOBS)
    future = time.time() + 86400
    for path in root.rglob("*"):
        os.utime(path, (future, future))
    cache.evict()
    assert isinstance(cache.lookup("artifact", key), Entry)
    (manifest,) = [path for path in (root / ENTRY_AREA).rglob("*") if path.is_file()]
    assert abs(manifest.stat().st_mtime - time.time()) < 5


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_c2_triton_11867_stale_network_file_is_a_miss_and_stays(
    cache, root, key, monkeypatch, code
):
    cache.publish("artifact", key, META, BLOBS)
    read = directory_module.read_file
    stale = [2]

    def read_file(path, limit):
        stale[0] -= 1
        if stale[0] == 0:
            raise OSError(code, os.strerror(code), str(path))
        return read(path, limit)

    monkeypatch.setattr(directory_module, "read_file", read_file)
    missed = cache.lookup("artifact", key)
    assert missed.reason == "unreadable"
    assert os.strerror(code) in missed.detail
    assert isinstance(cache.lookup("artifact", key), Entry)


def test_c2_triton_11867_blob_that_is_not_visible_yet(cache, root, key):
    entry = cache.publish("artifact", key, META, BLOBS)
    blob = root / blob_name(entry.manifest.blobs["code.py"].sha256)
    blob.rename(root / "hidden")
    missed = cache.lookup("artifact", key)
    assert missed.reason == "incomplete"
    (root / "hidden").rename(blob)
    assert isinstance(cache.lookup("artifact", key), Entry)


def test_c2_triton_11512_clean_up_that_fails_is_no_failure(cache, events, key, monkeypatch):
    def busy(*args, **options):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(os, "rmdir", busy)
    cache.publish("artifact", key, META, BLOBS)
    assert isinstance(cache.lookup("artifact", key), Entry)
    assert events.counters["cache.publish_failed"] == 0


def test_c2_insitubatch_42_published_files_are_replaced_and_never_truncated(cache, root, key):
    cache.publish("artifact", key, META, BLOBS)
    held = [path.open("rb") for path in root.rglob("*") if path.is_file()]
    cache.publish("artifact", key, META, {"code.py": b"other"})
    cache.publish("artifact", key, META, BLOBS)
    assert all(file.read() for file in held)
    for file in held:
        file.close()


def test_a_file_system_without_locks_is_done_without(cache, key, monkeypatch):
    """Older versions of filelock raise no OSError for that."""

    def acquire(*args, **options):
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with cache.single_flight("artifact", key) as flight:
        assert flight is Flight.UNLOCKED


def test_a_loop_of_links_is_an_error_with_advice(tmp_path, events):
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(CacheNotWritable):
        Cache(tmp_path / "loop", events)


def test_a_path_that_cannot_be_made_is_an_error_with_advice(tmp_path, events):
    (tmp_path / "file").touch()
    with pytest.raises(CacheNotWritable, match="turn the cache off"):
        Cache(tmp_path / "file" / "cache", events)
