"""`verify` distinguishes corrupt, untrusted and unverifiable, and changes nothing."""

import os

import pytest

from piecegraph.cache import Cache, Key
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.inspection import nearest_entries
from piecegraph.cache.names import ENTRY_AREA, blob_name, entry_name
from piecegraph.events import Events
from piecegraph.tools.cache_verify import Status, exit_status, verify

from .conftest import BLOBS, META


@pytest.fixture
def manifest(cache, root, key):
    cache.publish("artifact", key, META, BLOBS)
    return root / entry_name("artifact", key.digest)


@pytest.fixture
def blob(cache, root, key):
    entry = cache.publish("artifact", key, META, BLOBS)
    return root / blob_name(entry.manifest.blobs["code.py"].sha256)


def test_clean(manifest, root):
    assert exit_status(verify(root)) == 0


def test_corrupt_manifest(manifest, root, key):
    manifest.write_bytes(manifest.read_bytes()[:-1])
    (finding,) = verify(root)
    assert (finding.status, finding.name) == (
        Status.CORRUPT,
        entry_name("artifact", key.digest),
    )
    assert exit_status([finding]) == 1


def test_corrupt_blob_is_found_also_if_no_entry_needs_it(blob, root):
    blob.write_bytes(b"other")
    assert len(verify(root)) == 2
    assert exit_status(verify(root)) == 1
    for path in (root / ENTRY_AREA).rglob("*"):
        if path.is_file():
            path.unlink()
    (finding,) = verify(root)
    assert finding.reason == "not the bytes of its name"


def test_untrusted(manifest, root):
    root.chmod(0o777)
    assert exit_status(verify(root)) == 2


def test_unverifiable(blob, root):
    blob.unlink()
    assert exit_status(verify(root)) == 4


def test_stray_file_is_unverifiable(manifest, root):
    stray = manifest.with_name(".nfs0001")
    stray.touch()
    (finding,) = verify(root)
    assert (finding.status, finding.reason) == (Status.UNVERIFIABLE, "no entry has this name")


def test_directory_that_cannot_be_listed_is_unverifiable(manifest, root, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "listdir", refuse)
    assert exit_status(verify(root)) == 4
    assert nearest_entries([DirectoryLayer(root)], "artifact", Key.of("codegen", {})) == []


def test_statuses_are_summed(manifest, blob, root):
    other = Cache(root, Events()).publish("artifact", Key.of("trace", {}), {}, {"x": b"x"})
    (root / blob_name(other.manifest.blobs["x"].sha256)).unlink()
    blob.write_bytes(b"other")
    root.chmod(0o755)
    assert exit_status(verify(root)) == 1 + 2 + 4


def test_missing_directory_is_unverifiable(tmp_path):
    assert exit_status(verify(tmp_path / "none")) == 4


def test_nothing_is_changed(manifest, blob, root):
    blob.write_bytes(b"other")
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    verify(root)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == before
