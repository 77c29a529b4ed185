"""Machines with separate directories that share a layer on an S3 server, in real processes."""

import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from piecegraph.cache.evict import Limits, evict
from piecegraph.events import Events

from .conftest import command_of, starts

pytestmark = [
    pytest.mark.compile, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900),
]  # fmt: skip

MACHINES = 6


class Fleet:
    """Machines with directories of their own and one bucket."""

    def __init__(self, bucket, directory):
        import s3fs

        layer = {"at": f"{bucket}/cache", "write_back": True, "trust": "anybody"}
        self.settings = {"cache": {"layers": [layer], "verify_bundle": "off"}}
        self.directory = directory
        self.files = s3fs.S3FileSystem()
        self.root = f"{bucket}/cache"

    def start(self, *machines, before=(), **options):
        """The outcomes of machines that start at the same time."""

        def one(machine):
            (outcome,) = starts(
                self.directory / machine, [{**self.settings, **options}], before=before
            )
            return outcome

        with ThreadPoolExecutor(MACHINES) as pool:
            outcomes = list(pool.map(one, machines))
        assert max(outcome["error_of_results"] for outcome in outcomes) < 1e-5
        return outcomes

    def stored(self, area=""):
        self.files.invalidate_cache()
        return set(self.files.find(f"{self.root}/{area}"))


@pytest.fixture
def fleet(bucket, tmp_path):
    return Fleet(bucket, tmp_path)


def compiles(outcomes):
    return sorted(outcome["counters"].get("inductor_compiles", 0) for outcome in outcomes)


def all_of(prefix):
    return [f"{prefix}{number}" for number in range(MACHINES)]


def test_one_of_six_cold_machines_compiles(fleet):
    outcomes = fleet.start(*all_of("first"))
    *waited, compiled = compiles(outcomes)
    assert waited == [0] * (MACHINES - 1)
    assert compiled > 0
    assert sum(outcome["hit"] for outcome in outcomes) == MACHINES - 1
    warm = fleet.start(*all_of("second"))
    assert compiles(warm) == [0] * MACHINES
    assert all(outcome["hit"] for outcome in warm)


def test_machines_serve_uncompiled_while_one_of_them_compiles(fleet):
    outcomes = fleet.start(*all_of("machine"), bundle="serve")
    *waited, compiled = compiles(outcomes)
    assert waited == [0] * (MACHINES - 1)
    assert compiled > 0
    for outcome in outcomes:
        assert outcome["background"] is None or outcome["background"]["state"] == "compiled"
        assert max(outcome["error_of_uncompiled"], outcome["error_of_results"]) < 1e-5


def test_a_killed_holder_is_followed_by_one_of_those_who_wait(fleet):
    """A lease that did not change for a minute is that of a dead machine."""
    killed = subprocess.Popen(
        command_of(fleet.directory / "killed", [fleet.settings]), stdout=subprocess.DEVNULL
    )
    while not fleet.stored("locks"):
        assert killed.poll() is None
        time.sleep(0.05)
    killed.kill()
    assert killed.wait() == -signal.SIGKILL
    assert fleet.stored("locks")
    outcomes = fleet.start("one", "two")
    assert sum(outcome["hit"] for outcome in outcomes) == 1
    assert not fleet.stored("locks")


def test_two_versions_share_a_layer_and_each_finds_its_own(fleet):
    """A rolling upgrade and its rollback: machines of both versions start side by side."""
    (first,) = fleet.start("old1", version="1.0.0")
    assert not first["hit"]
    with ThreadPoolExecutor() as pool:
        old = pool.submit(fleet.start, "old2", version="1.0.0")
        new = pool.submit(fleet.start, "new1", "new2", version="2.0.0")
    assert [outcome["hit"] for outcome in old.result()] == [True]
    assert sorted(outcome["hit"] for outcome in new.result()) == [False, True]
    assert len(fleet.stored("entries-v2/bundle")) == 2
    for machine in ("new1", "old3"):  # an upgraded machine goes back, a new one has the old version
        (back,) = fleet.start(machine, version="1.0.0", bundle="force")
        assert back["hit"]


def test_what_is_purged_outside_is_stored_again_by_who_has_it(fleet):
    fleet.start("one")
    stored = fleet.stored()
    fleet.files.rm(fleet.root, recursive=True)
    for lost in (stored, {max(path for path in stored if "/blobs" in path)}):
        for path in fleet.stored() & lost:
            fleet.files.rm_file(path)
        (kept,) = fleet.start("one", bundle="force")
        assert kept["hit"]
        bundle = {path for path in stored if "/entries-v2/artifact" not in path}
        assert lost & bundle <= fleet.stored()
        (new,) = fleet.start(f"new{len(lost)}", bundle="force")
        assert new["hit"]


def test_a_directory_is_pruned_all_the_time_while_machines_start(fleet):
    """They share one private directory, and lose what they have just stored or found."""
    ended, prunes = threading.Event(), list[int]()

    def prune():
        while not ended.wait(0.02):
            evict(fleet.directory / "one", Limits(size=0, grace=0), Events())
            prunes.append(1)

    pruning = threading.Thread(target=prune)
    pruning.start()
    try:
        for _ in range(2):
            fleet.start("one", "one", "one")
    finally:
        ended.set()
        pruning.join()
    assert len(prunes) > 10
    (found,) = fleet.start("two", bundle="force")
    assert found["hit"]


def test_a_machine_with_a_full_disk_serves_what_the_layer_has(fleet):
    small = fleet.directory / "small"
    small.mkdir(mode=0o700)
    mounted = f'mount -t tmpfs -o size=64k,mode=700 tmpfs {small} && exec "$@"'
    before = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh"]
    cold, warm = fleet.start("small", before=before), fleet.start("small", before=before)
    assert [outcome["hit"] for outcome in cold + warm] == [False, True]
    for (outcome,) in (cold, warm):
        assert outcome["counters"]["cache.publish_failed"] > 0
    (found,) = fleet.start("large", bundle="force")
    assert found["hit"]


def test_clocks_that_differ_by_days_change_nothing(fleet):
    with ThreadPoolExecutor() as pool:
        early = pool.submit(fleet.start, "early1", "early2", skew=-86400)
        late = pool.submit(fleet.start, "late1", skew=86400)
        outcomes = early.result() + late.result()
    assert sum(outcome["hit"] for outcome in outcomes) == 2
    assert all(outcome["hit"] for outcome in fleet.start("early1", "late1", skew=86400))
    assert all(outcome["hit"] for outcome in fleet.start("late1", "new", skew=-86400))
