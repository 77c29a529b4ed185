"""A cache on an empty private directory, and the data of an entry."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest

from piecegraph.cache import Cache, Key, directory
from piecegraph.cache.signing import SigningKey, TrustedKeys
from piecegraph.events import Events

BLOBS = {"code.py": b"print('piece')\n", "kernel.so": bytes(range(256)) * 4}
META = {"compile_seconds": 2.5, "signature": ["f32[s0, 64]"]}


def numbered(number):
    return Key.of("codegen", {"number": number})


@contextmanager
def at_each_step(call):
    """Calls `call` after each step of a publish inside: "blob written", "manifest placed", …"""

    def followed(step, done):
        def run(path, *rest):
            step(path, *rest)
            call(f"{path.name} {done}")

        return run

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(directory, "write_synced", followed(directory.write_synced, "written"))
        patch.setattr(directory, "place", followed(directory.place, "placed"))
        yield


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def memory_root():
    """As `root`, on a file system in memory if there is one: fsync on a disk is slow."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as directory:
        yield Path(directory) / "cache"


@pytest.fixture(scope="session")
def signer():
    return SigningKey.new()


@pytest.fixture(scope="session")
def trusted(signer):
    """What trusts `signer` alone."""
    return TrustedKeys({signer.public.id: signer.public})


@pytest.fixture
def cache(root, events):
    return Cache(root, events)


@pytest.fixture
def key():
    return Key.of("codegen", {"piece": "3f2a", "torch": "2.13.0", "config": {"level": 2}})
