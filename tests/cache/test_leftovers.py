"""Temporary files of killed processes are removed by the next process, those in use are not."""

import os
import signal
import tempfile
import time

from piecegraph.cache import Cache, Entry
from piecegraph.cache import lock as lock_module
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.evict import Limits, evict
from piecegraph.cache.lock import owned_directory, remove_unowned, temporary_directory
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA
from piecegraph.events import Events
from piecegraph.tools.cache_image import export_image

from .children import die, fork, status
from .conftest import BLOBS, at_each_step, numbered


def die_at(wanted):
    def fault(step):
        if step == wanted:
            die()

    return fault


def kill_in(work):
    assert status(fork(work)) == -signal.SIGKILL


def publish(root, number=0, step=""):
    cache = Cache(root, Events())
    with at_each_step(die_at(step)):
        cache.publish("artifact", numbered(number), {}, BLOBS)


def test_next_start_removes_the_files_of_a_killed_publish(root):
    kill_in(lambda: publish(root, step="blob written"))
    assert list((root / "tmp").iterdir())
    Cache(root, Events())
    assert list((root / "tmp").iterdir()) == []


def test_files_of_a_running_publish_stay(root):
    def start_another(step):
        if step in ("blob written", "manifest written"):
            before = set((root / "tmp").rglob("*"))
            assert status(fork(lambda: evict_all(root))) == 0
            assert set((root / "tmp").rglob("*")) == before

    cache = Cache(root, Events())
    with at_each_step(start_another):
        cache.publish("artifact", numbered(0), {}, BLOBS)
    assert isinstance(cache.lookup("artifact", numbered(0)), Entry)


def evict_all(root):
    Cache(root, Events())
    evict(root, Limits(size=0, leftover=3600), Events())


def test_next_export_removes_the_files_of_a_killed_one(root, tmp_path, monkeypatch):
    publish(root)
    source = DirectoryLayer(root)
    manifest = Cache(root, Events()).publish("artifact", numbered(1), {}, BLOBS).manifest
    directory = tmp_path / "exports"
    directory.mkdir()

    def export():
        export_image([manifest], source, directory / "one.tar")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *paths: die())
        kill_in(export)
    assert [path.name[:18] for path in directory.iterdir()] == [".piecegraph-export"]
    export()
    assert [path.name for path in directory.iterdir()] == ["one.tar"]


def test_next_start_removes_the_temporary_directory_of_a_killed_compile(
    root, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def compile_and_die():
        with temporary_directory() as directory:
            (directory / "kernel.cpp").touch()
            die()

    kill_in(compile_and_die)
    with temporary_directory() as used:
        assert len(list(tmp_path.glob("piecegraph-*"))) == 2
        Cache(root, Events())
        assert list(tmp_path.glob("piecegraph-*")) == [used]
    assert not used.exists()


def test_directory_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    make, made = tempfile.mkdtemp, []

    def make_and_remove(**options):
        made.append(make(**options))
        if len(made) == 1:
            remove_unowned(tmp_path)
        return str(made[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_remove)
    with owned_directory(tmp_path) as directory:
        assert directory.is_dir()
    assert len(made) == 2


def test_without_locks_only_the_age_decides(root, monkeypatch):
    def refuse(*args):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", refuse)
    cache = Cache(root, Events())
    with owned_directory(root / "tmp") as directory:
        cache.evict()
        assert directory.is_dir()
        os.utime(directory, (0, 0))
        cache.evict()
        assert not directory.exists()


def test_links_and_directories_of_others_are_not_removed(tmp_path):
    (tmp_path / "target").mkdir()
    (tmp_path / "owned-link").symlink_to(tmp_path / "target")
    (tmp_path / "owned-file").touch()
    (tmp_path / "other").mkdir()
    names = {path.name for path in tmp_path.iterdir()}
    remove_unowned(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names


def test_quarantine_is_limited_by_size_and_keeps_the_newest(root):
    cache = Cache(root, Events(), limits=Limits(size=16 * 2500))
    for number in range(6):
        entry = cache.publish("artifact", numbered(number), {}, {"x": bytes([number]) * 1000})
        file = root / BLOB_AREA / entry.manifest.blobs["x"].sha256[:2]
        (file / entry.manifest.blobs["x"].sha256).write_bytes(b"?" * 1000)
        cache.lookup("artifact", numbered(number))
        for age, kept in enumerate(sorted((root / "quarantine").iterdir(), key=os.path.getmtime)):
            os.utime(kept, (time.time() - 100 + age,) * 2)
    assert 1 <= len(list((root / "quarantine").iterdir())) <= 2


def test_entries_from_the_future_can_be_evicted(root, events):
    cache = Cache(root, events)
    for number in range(10):
        cache.publish("artifact", numbered(number), {}, {"x": bytes([number])})
    future = time.time() + 30 * 86400
    for path in root.rglob("*"):
        os.utime(path, (future, future))
    evict(root, Limits(size=0, grace=0), events)
    assert not [path for path in (root / ENTRY_AREA).rglob("*") if path.is_file()]
    assert not [path for path in (root / BLOB_AREA).rglob("*") if path.is_file()]
