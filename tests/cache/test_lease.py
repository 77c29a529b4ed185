"""Leases in a shared layer: of many machines that miss a key, one does the work."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from piecegraph.cache import Cache, Entry, Key
from piecegraph.cache import lease as leases
from piecegraph.cache.lock import Flight
from piecegraph.cache.names import lock_name
from piecegraph.cache.remote import RemoteLayer
from piecegraph.cache.signing import trust_all
from piecegraph.events import Events

from .conftest import BLOBS, META


@pytest.fixture(autouse=True)
def short_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.005)


class Machine:
    """A machine with its own directory, and the layer that all of them write to."""

    def __init__(self, directory: Path, name: str) -> None:
        self.events = Events()
        self.layer = RemoteLayer(f"file://{directory}/bucket", trust_all, write_back=True)
        self.cache = Cache(directory / name, self.events, shared=[self.layer])

    def flight(self, key: Key, limit: float = 60.0) -> contextlib.AbstractContextManager[Flight]:
        return self.cache.single_flight("bundle", key, wait_limit=limit, progress_every=0.0)

    def work(self, key: Key, done: list[Flight]) -> None:
        """As a cold start: look up, and do the work if it is not done."""
        with self.flight(key) as flight:
            if not isinstance(self.cache.lookup("bundle", key), Entry):
                self.cache.publish("bundle", key, META, BLOBS)
                done.append(flight)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Machine]]:
    yield [Machine(tmp_path, f"machine {n}") for n in range(6)]
    assert not list((tmp_path / "bucket").glob("locks/*")), "all leases are given back"


def test_one_of_six_machines_does_the_work(machines: list[Machine], key: Key) -> None:
    done: list[Flight] = []
    threads = [threading.Thread(target=each.work, args=(key, done)) for each in machines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done == [Flight.FIRST]


def test_who_comes_when_the_work_is_done_looks_it_up(machines: list[Machine], key: Key) -> None:
    first, second, *_ = machines
    assert not isinstance(second.cache.lookup("bundle", key), Entry)
    first.work(key, [])
    with second.flight(key) as flight:
        assert flight is Flight.AFTER_OTHERS
        assert isinstance(second.cache.lookup("bundle", key), Entry)


def test_who_waits_goes_on_when_the_work_is_stored(machines: list[Machine], key: Key) -> None:
    first, second, *_ = machines
    waits = threading.Event()
    second.events.listeners.append(lambda event: event.name == "cache.wait" and waits.set())
    flights: list[Flight] = []

    def wait() -> None:
        assert not isinstance(second.cache.lookup("bundle", key), Entry), "remembered as missing"
        with second.flight(key) as flight:
            flights.append(flight)
            assert isinstance(second.cache.lookup("bundle", key), Entry)

    with first.flight(key):
        thread = threading.Thread(target=wait)
        thread.start()
        assert waits.wait(60)
        first.cache.publish("bundle", key, META, BLOBS)
        thread.join()  # the lease is still held
    assert flights == [Flight.AFTER_OTHERS]


def test_a_lease_that_does_not_change_is_that_of_a_dead_machine(
    machines: list[Machine], key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    first, *_ = machines
    assert first.layer.create(lock_name("bundle", key.digest), b"of the dead")
    with first.flight(key) as flight:
        assert flight is Flight.AFTER_OTHERS


def test_a_living_holder_renews_its_lease(
    machines: list[Machine], key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "EXPIRES_SECONDS", 0.02)
    layer, name = machines[0].layer, lock_name("bundle", key.digest)
    with machines[0].flight(key):
        seen = {layer.read_again(name, 100)}
        while len(seen) < 3:
            seen.add(layer.read_again(name, 100))


def test_a_wait_has_an_end(machines: list[Machine], key: Key) -> None:
    first, second, *_ = machines
    with first.flight(key) as one, second.flight(key, limit=0.02) as two:
        assert (one, two) == (Flight.FIRST, Flight.UNLOCKED)
    assert second.events.counters["cache.duplicate_work"] == 1


def test_a_layer_without_leases_is_done_without(
    machines: list[Machine], key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise PermissionError("Forbidden")

    first, *_ = machines
    monkeypatch.setattr(first.layer._files, "pipe_file", fail)
    with first.flight(key) as flight:
        assert flight is Flight.UNLOCKED
    (event,) = first.events.named("cache.flight")[-1:]
    assert "Forbidden" in event.facts["alone"]
