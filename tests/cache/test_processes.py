"""Many processes on one directory: readers, writers and evictions at the same time."""

import contextlib
import importlib
import os
import random
import resource
import signal
import sys
import threading
import time

import pytest

from piecegraph.cache import Cache, Entry
from piecegraph.cache.evict import Limits
from piecegraph.cache.lock import Flight
from piecegraph.cache.names import BLOB_AREA
from piecegraph.events import Events
from piecegraph.tools.cache_verify import verify
from tests.processes import at_once

from .children import die, fork, run_all, status
from .conftest import at_each_step, numbered

pytestmark = pytest.mark.slow

PROCESSES = 16


def blobs(number, writer):
    """A blob that names its writer, and one that all writers share."""
    return {"code": b"%d by %d" % (number, writer), "shared": b"%d" % number * 3000}


def is_of_one_writer(entry, number):
    return any(entry.contents == blobs(number, writer) for writer in range(PROCESSES))


def test_sixteen_processes_publish_one_key_c2_triton_11319(memory_root):
    """A blob of one writer is never found with a blob of another."""
    keys = [numbered(0)] * PROCESSES

    def publish_and_read(writer):
        def work():
            cache = Cache(memory_root, Events())
            for _ in range(30):
                cache.publish("artifact", keys[writer], {}, blobs(0, writer))
                found = cache.lookup("artifact", keys[writer])
                assert isinstance(found, Entry), found
                assert is_of_one_writer(found, 0)

        return work

    assert run_all([publish_and_read(writer) for writer in range(PROCESSES)]) == [0] * PROCESSES
    assert verify(memory_root) == []


def test_sixteen_processes_publish_different_keys(memory_root):
    def publish(writer):
        def work():
            cache = Cache(memory_root, Events())
            for number in range(10):
                key = numbered(number * PROCESSES + writer)
                cache.publish("artifact", key, {}, blobs(number, writer))

        return work

    assert run_all([publish(writer) for writer in range(PROCESSES)]) == [0] * PROCESSES
    reader = Cache(memory_root, Events())
    for number in range(10):
        for writer in range(PROCESSES):
            found = reader.lookup("artifact", numbered(number * PROCESSES + writer))
            assert found.contents == blobs(number, writer)


def test_sixteen_processes_compile_once(root, tmp_path):
    compiled = tmp_path / "compiled"

    def prepare():
        cache = Cache(root, Events())
        key = numbered(1)
        with cache.single_flight("artifact", key) as flight:
            assert flight is not Flight.UNLOCKED
            if not isinstance(cache.lookup("artifact", key), Entry):
                with compiled.open("ab") as file:
                    file.write(b"x")
                time.sleep(0.05)
                cache.publish("artifact", key, {}, blobs(1, 0))
        assert isinstance(cache.lookup("artifact", key), Entry)

    assert run_all([prepare] * PROCESSES) == [0] * PROCESSES
    assert compiled.read_bytes() == b"x"


def test_threads_compile_once(cache):
    compiled = []

    def prepare(_):
        with cache.single_flight("artifact", numbered(1)):
            if not isinstance(cache.lookup("artifact", numbered(1)), Entry):
                compiled.append(1)
                cache.publish("artifact", numbered(1), {}, blobs(1, 0))

    at_once(prepare, range(4))
    assert compiled == [1]


def test_different_keys_do_not_wait_for_each_other(root):
    first, second = Cache(root, Events()), Cache(root, Events())
    with first.single_flight("artifact", numbered(1)):
        with second.single_flight("artifact", numbered(2), wait_limit=0) as flight:
            assert flight is Flight.FIRST
        with second.single_flight("bundle", numbered(1), wait_limit=0) as flight:
            assert flight is Flight.FIRST


def test_waiter_goes_on_unlocked_after_its_limit_and_reports_its_waiting(root):
    events = Events()
    holder, waiter = Cache(root, Events()), Cache(root, events)
    with holder.single_flight("artifact", numbered(1)):
        waiting = waiter.single_flight("artifact", numbered(1), wait_limit=0.35, progress_every=0.1)
        with waiting as flight:
            assert flight is Flight.UNLOCKED
    assert len(events.named("cache.wait")) >= 2
    assert "0.35 s" in events.named("cache.flight")[0].facts["alone"]
    assert events.counters["cache.duplicate_work"] == 1


def test_lock_of_a_dead_holder_is_free_at_once(root, events):
    reports, report = os.pipe()

    def hold():
        with Cache(root, Events()).single_flight("artifact", numbered(1)):
            os.write(report, b"x")
            time.sleep(60)

    pid = fork(hold)
    os.read(reports, 1)
    began = time.monotonic()
    threading.Timer(0.2, os.kill, (pid, signal.SIGKILL)).start()
    with Cache(root, events).single_flight("artifact", numbered(1)) as flight:
        waited = time.monotonic() - began
    assert flight is Flight.AFTER_OTHERS
    assert 0.1 < waited < 5
    assert status(pid) == -signal.SIGKILL
    os.close(reports)
    os.close(report)


def test_flight_that_finds_the_entry_comes_after_others(root):
    first, late = Cache(root, Events()), Cache(root, Events())
    assert not isinstance(late.lookup("artifact", numbered(1)), Entry)
    with first.single_flight("artifact", numbered(1)) as flight:
        first.publish("artifact", numbered(1), {}, blobs(1, 0))
    assert flight is Flight.FIRST
    with late.single_flight("artifact", numbered(1)) as flight:
        assert flight is Flight.AFTER_OTHERS


def test_lock_is_released_when_the_work_fails(cache):
    with pytest.raises(ZeroDivisionError), cache.single_flight("artifact", numbered(1)):
        _ = 1 / 0
    with cache.single_flight("artifact", numbered(1), wait_limit=0) as flight:
        assert flight is Flight.FIRST


def test_readers_and_writers_during_eviction(memory_root):
    """With a grace period of zero, blobs are removed while in use: whole entries or misses."""

    def use(writer):
        def work():
            chance = random.Random(writer)
            limits = Limits(size=9_000, grace=0.0)
            cache = Cache(memory_root, Events(), limits=limits)
            for _ in range(60):
                number = chance.randrange(6)
                found = cache.lookup("artifact", numbered(number))
                if isinstance(found, Entry):
                    assert is_of_one_writer(found, number)
                else:
                    assert found.reason in ("absent", "incomplete"), found
                    cache.publish("artifact", numbered(number), {}, blobs(number, writer))
                cache.evict()

        return work

    assert run_all([use(writer) for writer in range(8)]) == [0] * 8
    assert not [finding for finding in verify(memory_root) if "other bytes" in finding.reason]


def test_blob_re_used_while_it_is_evicted_survives(root, events):
    """An eviction that has not seen the new manifest removes the blob; the writer restores it."""
    Cache(root, events).publish("artifact", numbered(1), {}, {"x": b"shared"})

    def evict_all(step):
        if step == "manifest written":
            for path in (root / BLOB_AREA).rglob("*"):
                if path.is_file():
                    path.unlink()

    writer = Cache(root, events)
    with at_each_step(evict_all):
        writer.publish("artifact", numbered(2), {}, {"x": b"shared"})
    assert isinstance(writer.lookup("artifact", numbered(2)), Entry)


def test_killed_waiters_hold_no_lock(root):
    holder = Cache(root, Events())
    with holder.single_flight("artifact", numbered(1)):
        pid = fork(lambda: kill_while_waiting(root))
        assert status(pid) == -signal.SIGKILL
    with holder.single_flight("artifact", numbered(1), wait_limit=0) as flight:
        assert flight is Flight.FIRST


def kill_while_waiting(root):
    threading.Timer(0.1, die).start()
    with Cache(root, Events()).single_flight("artifact", numbered(1)):
        pass


def test_flight_without_file_descriptors_goes_on_unlocked(root):
    def work():
        events = Events()
        cache = Cache(root, events)
        for name in [name for name in sys.modules if name.split(".")[0] == "filelock"]:
            del sys.modules[name]  # as in a process that has not imported it
        importlib.invalidate_caches()
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, highest))
        with contextlib.suppress(OSError):
            while True:
                os.dup(0)
        with cache.single_flight("artifact", numbered(1)) as flight:
            assert flight is Flight.UNLOCKED
        assert "Too many open files" in events.named("cache.flight")[0].facts["alone"]

    assert run_all([work]) == [0]
