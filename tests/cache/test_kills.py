"""Processes are killed at random while they write; the next start removes what they leave."""

import os
import random
import signal
import tempfile
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from piecegraph.cache import Cache, Entry
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.evict import Limits, evict
from piecegraph.cache.inspection import manifests
from piecegraph.cache.lock import temporary_directory
from piecegraph.cache.names import blob_name, entry_name
from piecegraph.cache.signing import trust_all
from piecegraph.events import Events
from piecegraph.tools.cache_image import export_image
from piecegraph.tools.cache_import import import_image
from piecegraph.tools.cache_verify import Status, verify

from .children import fork, status
from .conftest import numbered

LIMITS = Limits(size=2 << 20, grace=0)
ENTRIES = 30


def contents(number):
    """Two blobs of which the second is shared with other entries; 100 KiB and 50 KiB."""
    return {"own": bytes([number]) * 100_000, "shared": bytes([number % 3]) * 50_000}


class Operations:
    """What a killed process may have been doing to the directory `root`."""

    def __init__(self, root, exports):
        self.root, self.exports = root, exports

    def publish(self):
        cache = Cache(self.root, Events(), limits=LIMITS)
        for number in random.sample(range(ENTRIES), 3):
            cache.publish("artifact", numbered(number), {}, contents(number))

    def damage(self):
        """Look up a damaged entry, which is moved to quarantine."""
        cache = Cache(self.root, Events(), limits=LIMITS)
        entry = cache.publish("artifact", numbered(0), {}, contents(0))
        stored = cache.path(entry, "own")
        stored.write_bytes(b"?" * 100_000)
        cache.lookup("artifact", numbered(0))

    def prune(self):
        evict(self.root, Limits(size=random.choice((0, 1 << 20)), grace=0), Events())

    def export(self):
        source = DirectoryLayer(self.root)
        chosen = [manifest for manifest, _ in manifests(self.root)][:5]
        export_image(chosen, source, self.exports / "all.tar")

    def import_(self):
        cache = Cache(self.root, Events(), limits=LIMITS)
        for entry in import_image(self.exports / "given.tar", trust_all):
            cache.store(entry)

    def compile(self):
        with temporary_directory() as directory:
            for number in range(10):
                (directory / f"{number}.cpp").write_bytes(bytes(50_000))


@contextmanager
def begun(work):
    """A child that has begun `work`, and a pipe that says when it has done it.

    To fork a process that has imported much, and to end it, takes longer than the work."""
    reports, report = os.pipe()

    def reported():
        os.write(report, b"begun")
        work()
        os.write(report, b"done")

    pid = fork(reported)
    os.close(report)
    assert os.read(reports, 5) == b"begun"
    yield pid, reports
    os.close(reports)


def killed_at_random(work, seconds, chance):
    """Run `work` in a child and kill it; False if it was done by then."""
    seed = chance.random()

    def seeded():
        random.seed(seed)
        work()

    with begun(seeded) as (pid, reports):
        time.sleep(chance.uniform(0, 1.2 * seconds))
        os.kill(pid, signal.SIGKILL)
        return status(pid) == -signal.SIGKILL and not os.read(reports, 4)


def seconds_of(work):
    with begun(work) as (pid, reports):
        began = time.perf_counter()
        assert os.read(reports, 4) == b"done"
        seconds = time.perf_counter() - began
        assert status(pid) == 0
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [24, pytest.param(500, marks=pytest.mark.heavy)])
def test_random_kills_leave_nothing_beyond_the_limits(wanted, memory_root, monkeypatch):
    temporary, exports = memory_root.parent / "temporary", memory_root.parent / "exports"
    temporary.mkdir(parents=True)
    exports.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    operations = Operations(memory_root, exports)
    source = Cache(memory_root.parent / "source", Events())
    given = [source.publish("artifact", numbered(n), {}, contents(n)).manifest for n in range(9)]
    export_image(given, DirectoryLayer(memory_root.parent / "source"), exports / "given.tar")

    works = [
        operations.publish,
        operations.damage,
        operations.prune,
        operations.export,
        operations.import_,
        operations.compile,
    ]
    operations.publish()
    durations = {work: seconds_of(work) for work in works}
    chance, kills = random.Random(0), Counter[str]()
    while kills.total() < wanted:
        fewest = min(kills[work.__name__] for work in works)
        work = chance.choice([work for work in works if kills[work.__name__] <= fewest + 2])
        kills[work.__name__] += killed_at_random(work, durations[work], chance)
    assert min(kills.values()) > wanted / 20

    cache = Cache(memory_root, Events(), limits=LIMITS)
    assert list((memory_root / "tmp").iterdir()) == []
    assert list(temporary.iterdir()) == []
    cache.publish("artifact", numbered(ENTRIES), {}, contents(ENTRIES))
    files = [path for path in memory_root.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= LIMITS.size * (1 + 1 / 16)
    damaged = {finding.name for finding in verify(memory_root) if finding.status & Status.CORRUPT}
    own = given[0].blobs["own"].sha256
    assert damaged <= {entry_name("artifact", numbered(0).digest), blob_name(own)}
    for number in range(ENTRIES):
        found = cache.lookup("artifact", numbered(number))
        if isinstance(found, Entry):
            assert found.contents == contents(number)
        else:
            assert found.reason in ("absent", "incomplete", "damaged")
            cache.publish("artifact", numbered(number), {}, contents(number))
            assert isinstance(cache.lookup("artifact", numbered(number)), Entry)
    operations.export()  # what was damaged is built again
    assert sorted(path.name for path in exports.iterdir()) == ["all.tar", "given.tar"]
