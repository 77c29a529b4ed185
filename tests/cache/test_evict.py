"""Limits hold: the least recently used entries are removed, and none that is in use."""

import errno
import os
import time
from pathlib import Path

import pytest

from piecegraph.cache import Cache, Entry
from piecegraph.cache import evict as evict_module
from piecegraph.cache.evict import Limits, evict
from piecegraph.cache.names import BLOB_AREA, entry_name
from piecegraph.tools.cache_verify import verify

from .conftest import at_each_step, numbered

KB = 1024


@pytest.fixture
def filled(root, events):
    """Ten entries of 10 KiB and a shared blob of 10 KiB; entry n was used n hours ago."""
    cache = Cache(root, events)
    for number in range(10):
        blobs = {"own": bytes([number]) * 10 * KB, "shared": b"x" * 10 * KB}
        cache.publish("artifact", numbered(number), {}, blobs)
        set_idle(root, number, number * 3600)
    for path in (root / BLOB_AREA).rglob("*"):
        os.utime(path, (0, 0))
    return cache


def set_idle(root, number, seconds):
    at = time.time() - seconds
    os.utime(root / entry_name("artifact", numbered(number).digest), (at, at))


def left(root):
    return [n for n in range(10) if (root / entry_name("artifact", numbered(n).digest)).exists()]


def size(root):
    return sum(path.stat().st_size for path in (root / BLOB_AREA).rglob("*") if path.is_file())


def test_least_recently_used_entries_are_removed_first(filled, root, events):
    evict(root, Limits(size=45 * KB), events)
    assert left(root) == [0, 1, 2]
    assert size(root) == 40 * KB, "the shared blob stays and counts once"
    assert verify(root) == []
    assert events.counters["cache.evicted"] == 7
    assert events.named("cache.evict")[-1].facts == {"entries": 7, "kept": 3, "bytes": 70 * KB}


def test_a_lookup_counts_as_a_use(filled, root, events):
    assert isinstance(filled.lookup("artifact", numbered(9)), Entry)
    evict(root, Limits(size=35 * KB), events)
    assert left(root) == [0, 9]


def test_age_limit(filled, root, events):
    evict(root, Limits(age=4.5 * 3600), events)
    assert left(root) == [0, 1, 2, 3, 4]


def test_an_entry_that_lost_a_blob_is_removed_unless_it_is_being_published(filled, root, events):
    for number in (0, 3, 4):
        found = filled.lookup("artifact", numbered(number))
        assert isinstance(found, Entry)
        filled.path(found, "own").unlink()
        set_idle(root, number, number * 3600)
    evict(root, Limits(), events)
    assert left(root) == [0, 1, 2, 5, 6, 7, 8, 9]


def test_recently_used_entries_stay_whatever_the_limit(filled, root, events):
    evict(root, Limits(size=0, grace=2.5 * 3600), events)
    assert left(root) == [0, 1, 2]


def test_blob_of_an_unfinished_publish_stays(root, events):
    """An eviction runs after a writer has placed its blobs and before it places the manifest."""

    def evict_all(step):
        if step == "manifest written":
            before = size(root)
            evict(root, Limits(size=0), events)
            assert size(root) == before > 0

    cache = Cache(root, events)
    with at_each_step(evict_all):
        cache.publish("artifact", numbered(0), {}, {"x": b"new"})
    assert isinstance(cache.lookup("artifact", numbered(0)), Entry)


def test_file_that_was_just_returned_stays(filled, root, events):
    """A loader may be about to open it, although the entry has been replaced."""
    entry = filled.lookup("artifact", numbered(5))
    assert isinstance(entry, Entry)
    path = filled.path(entry, "own")
    filled.publish("artifact", numbered(5), {}, {"own": b"another"})
    evict(root, Limits(size=0), events)
    assert path.exists()


def test_blob_that_gets_an_entry_during_the_eviction_is_put_back(filled, root, events, monkeypatch):
    """The publish falls between the first listing of entries and the second."""
    replace = os.replace
    published = []

    def publish_first(source, target):
        if not published and "tmp" in Path(target).parts and BLOB_AREA in Path(source).parts:
            published.append(1)
            name = entry_name("artifact", numbered(0).digest)
            replace(root / "hidden", root / name)
        replace(source, target)

    (root / entry_name("artifact", numbered(0).digest)).rename(root / "hidden")
    monkeypatch.setattr(os, "replace", publish_first)
    evict(root, Limits(size=0, grace=60), events)
    assert isinstance(filled.lookup("artifact", numbered(0)), Entry)


@pytest.mark.slow
def test_publishing_keeps_the_directory_within_its_limit(root, events):
    cache = Cache(root, events, limits=Limits(size=100 * KB, grace=0.0))
    for number in range(60):
        cache.publish("artifact", numbered(number), {}, {"x": bytes([number]) * 5 * KB})
        assert size(root) < 120 * KB
    assert events.counters["cache.evicted"] > 30


def test_leftovers_of_dead_writers_are_removed_by_age(root, events):
    Cache(root, events)
    for area in ("tmp", "quarantine", "locks"):
        for name in ("old", "new"):
            (root / area / name).mkdir(parents=True)
            (root / area / name / "file").touch()
        os.utime(root / area / "old", (0, 0))
    evict(root, Limits(), events)
    for area in ("tmp", "quarantine", "locks"):
        assert [path.name for path in (root / area).iterdir()] == ["new"]


def test_damaged_manifest_is_evicted_like_any_other(filled, root, events):
    (root / entry_name("artifact", numbered(9).digest)).write_bytes(b"damaged")
    set_idle(root, 9, 9 * 3600)
    evict(root, Limits(age=8.5 * 3600), events)
    assert left(root) == list(range(9))


def test_manifest_that_cannot_be_read_now_keeps_its_blobs(filled, root, events, monkeypatch):
    """A temporary read error must not make needed blobs orphans."""
    before = size(root)

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(evict_module, "read_manifest", fail)
        evict(root, Limits(grace=0), events)
    assert "Input/output error" in events.named("cache.evict_failed")[0].facts["reason"]
    assert (left(root), size(root)) == (list(range(10)), before)


def test_eviction_that_fails_is_an_event(filled, root, events, monkeypatch):
    def refuse(path, missing_ok=False):
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    evict(root, Limits(size=0), events)
    assert "not permitted" in events.named("cache.evict_failed")[0].facts["reason"]
