"""Leases in a shared layer: of many machines that miss a key, one does the work."""

import contextlib
import itertools
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from piecegraph.cache import Cache, Entry, lock, remote
from piecegraph.cache import lease as leases
from piecegraph.cache.lock import Flight
from piecegraph.cache.names import lock_name
from piecegraph.cache.remote import RemoteLayer
from piecegraph.cache.signing import trust_all
from piecegraph.events import Events
from tests.processes import at_once

from .conftest import BLOBS, META


@pytest.fixture(autouse=True)
def short_polls(monkeypatch):
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.005)


class Machine:
    """A machine with its own directory, and the layer that all of them write to."""

    def __init__(self, directory, name, url=""):
        self.events = Events()
        url = url or f"file://{directory}/bucket"
        self.layer = RemoteLayer(url, trust_all, write_back=True)
        self.cache = Cache(directory / name, self.events, shared=[self.layer])

    def flight(self, key, limit=60.0):
        return self.cache.single_flight("bundle", key, wait_limit=limit, progress_every=0.0)

    def work(self, key, done):
        """As a cold start: look up, and do the work if it is not done."""
        with self.flight(key) as flight:
            if not isinstance(self.cache.lookup("bundle", key), Entry):
                self.cache.publish("bundle", key, META, BLOBS)
                done.append(flight)


@pytest.fixture
def machines(tmp_path):
    yield [Machine(tmp_path, f"machine {n}") for n in range(6)]
    assert not list((tmp_path / "bucket").glob("locks/*")), "all leases are given back"


def test_one_of_six_machines_does_the_work(machines, key):
    assert one_flight(machines, key)


@pytest.mark.slow
def test_one_of_six_machines_does_the_work_on_s3(bucket, tmp_path, key):
    machines = [Machine(tmp_path, f"machine {n}", f"{bucket}/cache") for n in range(6)]
    assert one_flight(machines, key)
    assert machines[0].layer.look(lock_name("bundle", key.digest), 100) is None


def one_flight(machines, key):
    """Whether one of machines that start at the same time works, without a wait before."""
    done = []
    at_once(lambda each: each.work(key, done), machines)
    return done == [Flight.FIRST]


def test_who_comes_when_the_work_is_done_looks_it_up(machines, key):
    first, second, *_ = machines
    assert not isinstance(second.cache.lookup("bundle", key), Entry)
    first.work(key, [])
    with second.flight(key) as flight:
        assert flight is Flight.AFTER_OTHERS
        assert isinstance(second.cache.lookup("bundle", key), Entry)


def test_who_waits_goes_on_when_the_work_is_stored(machines, key):
    first, second, *_ = machines
    assert wait_for_first(first, second, key, polls=1, held=True) is Flight.AFTER_OTHERS


def test_a_reader_finds_all_of_a_file_of_a_directory_or_none(machines, monkeypatch):
    layer, write, seen = machines[0].layer, remote.write_synced, []

    def looking(path, parts, mode):
        write(path, parts, mode)
        seen.append((layer.look("entries-v2/kind/aa/one", 100), layer.entries("kind")))

    monkeypatch.setattr(remote, "write_synced", looking)
    layer._write("entries-v2/kind/aa/one", b"whole")
    assert seen == [(None, [])]
    assert layer.look("entries-v2/kind/aa/one", 100) == b"whole"


def test_a_lease_that_does_not_change_is_that_of_a_dead_machine(machines, key, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    first, *_ = machines
    assert first.layer.create(lock_name("bundle", key.digest), b"of the dead")
    with first.flight(key) as flight:
        assert flight is Flight.AFTER_OTHERS


def test_a_living_holder_renews_its_lease(machines, key, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    layer, name = machines[0].layer, lock_name("bundle", key.digest)
    with machines[0].flight(key):
        seen = {layer.look(name, 100)}
        while len(seen) < 3:
            seen.add(layer.look(name, 100))


def test_a_wait_has_an_end(machines, key):
    first, second, *_ = machines
    with first.flight(key) as one, second.flight(key, limit=0.02) as two:
        assert (one, two) == (Flight.FIRST, Flight.UNLOCKED)
    assert second.events.counters["cache.duplicate_work"] == 1


def test_both_locks_have_one_deadline(machines, key, monkeypatch):
    limits = []
    flight = leases.Lease.flight

    def record(lease, limit, every):
        limits.append(limit)
        return flight(lease, limit, every)

    monkeypatch.setattr(leases.Lease, "flight", record)
    first, *_ = machines
    began = time.monotonic()
    acquire = lock._acquire

    def slow(*args):
        time.sleep(0.1)
        return acquire(*args)

    monkeypatch.setattr(lock, "_acquire", slow)
    with first.flight(key, limit=60.0):
        assert 60 - (time.monotonic() - began) <= limits[0] <= 60 - 0.1


@pytest.fixture
def forbidden(machines, monkeypatch):
    def fail(*args, **options):
        raise PermissionError("Forbidden")

    monkeypatch.setattr(machines[0].layer, "_put", fail)
    return machines[0]


def test_a_layer_without_leases_is_done_without(forbidden, key):
    with forbidden.flight(key) as flight:
        assert flight is Flight.UNLOCKED
    (event,) = forbidden.events.named("cache.flight")[-1:]
    assert "Forbidden" in event.facts["alone"]
    assert forbidden.events.counters["cache.duplicate_work"] == 1


def test_a_directory_has_one_creator(tmp_path):
    """fsspec looks whether a local file exists, and then writes it."""
    layers = [RemoteLayer(f"file://{tmp_path}/b", trust_all, write_back=True) for _ in range(4)]
    together = threading.Barrier(4)

    def create(layer):
        return [
            layer.create(f"locks/{number}", b"h") for number in range(100) if together.wait() >= 0
        ]

    with ThreadPoolExecutor(4) as threads:
        created = list(threads.map(create, layers))
    assert [sum(each) for each in zip(*created, strict=True)] == [1] * 100


class Flaky:
    """Fails the requests of a layer whose numbers are in `failing`; counts all by name."""

    def __init__(self, machine, failing=()):
        self.asked = []
        self.failing = failing
        self._ask = machine.layer._ask
        machine.layer._ask = self

    def __call__(self, name, request, *limit):
        self.asked.append(name.partition("/")[0])

        def flaky(path):
            if len(self.asked) in self.failing:
                raise OSError("503 Slow Down")
            return request(path)

        return self._ask(name, flaky, *limit)


def wait_for_first(first, second, key, *, polls=5, held=False):
    """How the second ends its wait for the work of the first, which it then finds; with `held` the
    first still has the lease."""
    polled = threading.Semaphore(0)
    second.events.listeners.append(lambda event: event.name == "cache.wait" and polled.release())
    flights = []

    def wait():
        assert not isinstance(second.cache.lookup("bundle", key), Entry), "remembered as missing"
        with second.flight(key) as flight:
            flights.append(flight)
            assert isinstance(second.cache.lookup("bundle", key), Entry)

    with first.flight(key):
        thread = threading.Thread(target=wait)
        thread.start()
        for _ in range(polls):
            assert polled.acquire(timeout=60)
        first.cache.publish("bundle", key, META, BLOBS)
        if held:
            thread.join()
    thread.join()
    (flight,) = flights
    return flight


def test_a_failed_request_does_not_end_a_wait(machines, key):
    first, second, *_ = machines
    Flaky(second, failing=(4, 5))
    assert wait_for_first(first, second, key) is Flight.AFTER_OTHERS
    assert second.events.counters["cache.duplicate_work"] == 0


def test_a_wait_takes_nothing_from_the_time_of_the_start(machines, key):
    first, second, *_ = machines
    left = []
    second.events.listeners.append(
        lambda event: event.name == "cache.wait" and left.append(second.layer._seconds_left)
    )
    wait_for_first(first, second, key)
    assert len(left) >= 5
    assert len(set(left)) == 1


def test_a_poll_reads_and_only_a_free_lease_is_written(machines, key):
    first, second, *_ = machines
    flaky = Flaky(second)
    written = []
    put = second.layer._put
    second.layer._put = lambda path, write: written.append(path) or put(path, write)
    second.events.listeners.append(
        lambda event: event.name == "cache.wait" and asked.append(len(flaky.asked))
    )
    asked = []
    wait_for_first(first, second, key)
    assert {after - before for before, after in itertools.pairwise(asked)} == {2}
    assert not written


def test_a_failed_renewal_costs_neither_the_lease_nor_the_result(machines, key, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    first, second, *_ = machines
    flaky = Flaky(first)
    with first.flight(key):
        flaky.failing = range(1000)
        asked = len(flaky.asked)
        while len(flaky.asked) < asked + 3:
            time.sleep(0.001)
        assert not isinstance(first.cache.lookup("artifact", key), Entry)  # fails too
        flaky.failing = ()
        first.cache.publish("bundle", key, META, BLOBS)
    assert isinstance(second.cache.lookup("bundle", key), Entry)


def test_a_lease_that_was_taken_is_left_alone(machines, key, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    first, second, *_ = machines
    name = lock_name("bundle", key.digest)
    with first.flight(key):
        while not first.events.counters["cache.duplicate_work"]:
            second.layer.overwrite(name, b"taken")  # again, if a renewal had read it before
            time.sleep(0.001)
    assert second.layer.look(name, 100) == b"taken"
    second.layer.remove(name)


def test_a_lease_that_was_purged_is_made_again(machines, key, monkeypatch):
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    first, second, *_ = machines
    name = lock_name("bundle", key.digest)
    with first.flight(key):
        second.layer.remove(name)
        while second.layer.look(name, 100) is None:
            time.sleep(0.001)


def test_an_entry_that_all_refuse_is_made_once(machines, key):
    """Each has it already, so that its being there does not end a wait."""
    first, second, *_ = machines
    first.cache.publish("bundle", key, META, BLOBS)
    assert isinstance(second.cache.lookup("bundle", key), Entry)
    polled = threading.Event()
    second.events.listeners.append(lambda event: event.name == "cache.wait" and polled.set())
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        stack.enter_context(first.flight(key))
        waiting = thread.submit(stack.enter_context, second.flight(key))
        assert polled.wait(300)
        assert not waiting.done()
        stack.pop_all().close()
        assert waiting.result() is Flight.AFTER_OTHERS
