"""What is published is found by every cache on the directory; a miss has a reason."""

import stat

import pytest

from piecegraph.cache import Cache, Entry, Key, Miss
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.lock import Flight
from piecegraph.cache.names import BLOB_AREA
from piecegraph.errors import InvalidEntry, InvalidName

from .conftest import BLOBS, META


def test_published_entry_is_found_by_another_cache_on_the_directory(cache, root, events, key):
    assert cache.lookup("artifact", key) == Miss("absent", layer="private")
    published = cache.publish("artifact", key, META, BLOBS)

    found = Cache(root, events).lookup("artifact", key)

    assert (found.meta, found.contents, found.key) == (META, BLOBS, key)
    assert found.digest == published.digest
    assert found.contents["code.py"] == BLOBS["code.py"]
    assert cache.path(found, "kernel.so").read_bytes() == BLOBS["kernel.so"]


def test_entries_of_other_kinds_and_keys_are_separate(cache, key):
    cache.publish("artifact", key, {}, BLOBS)
    assert isinstance(cache.lookup("bundle", key), Miss)
    assert isinstance(cache.lookup("artifact", Key.of("trace", key.factors)), Miss)


def test_equal_contents_are_stored_once(cache, root):
    for piece in ("a", "b"):
        cache.publish("artifact", Key.of("codegen", {"piece": piece}), {}, {"x": b"1", "y": b"1"})
    assert len([path for path in (root / BLOB_AREA).rglob("*") if path.is_file()]) == 1


def test_blob_given_as_a_file(cache, tmp_path, key):
    (tmp_path / "package").write_bytes(b"kernels")
    cache.publish("artifact", key, {}, {"package": tmp_path / "package"})
    found = cache.lookup("artifact", key)
    assert found.contents == {"package": b"kernels"}


def test_second_publish_of_a_key_replaces_the_entry(cache, key):
    cache.publish("artifact", key, {}, {"x": b"old"})
    cache.publish("artifact", key, {}, {"x": b"new", "y": b""})
    found = cache.lookup("artifact", key)
    assert found.contents == {"x": b"new", "y": b""}


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "a\0", "a\n", "x" * 129])
def test_name_that_could_leave_the_directory_is_refused(cache, key, name):
    with pytest.raises(InvalidName):
        cache.publish("artifact", key, {}, {name: b""})
    with pytest.raises(InvalidName):
        cache.publish(name, key, {}, {})
    with pytest.raises(InvalidName):
        Key.of(name, {})


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": object()}, {"x": "y" * (17 << 20)}])
def test_meta_that_no_reader_accepts_is_refused(cache, key, meta):
    with pytest.raises(InvalidEntry, match="meta as numbers"):
        cache.publish("artifact", key, meta, {})


def test_everything_written_is_closed_to_others(cache, root, key):
    cache.publish("artifact", key, META, BLOBS)
    for path in (root, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_temporary_is_left(cache, root, key):
    cache.publish("artifact", key, META, BLOBS)
    assert list((root / "tmp").iterdir()) == []


def test_disabled_cache_has_the_same_interface(events, key):
    off = Cache(None, events)
    with off.single_flight("artifact", key) as flight:
        entry = off.publish("artifact", key, META, BLOBS)
    assert flight is Flight.UNLOCKED
    assert not off.enabled
    assert off.path(entry, "kernel.so").read_bytes() == BLOBS["kernel.so"]
    assert off.lookup("artifact", key) == Miss("disabled")
    assert entry.unstored == ("it is off",)


def test_what_no_layer_can_store_is_not_stored(tmp_path, events, key):
    (tmp_path / "other").mkdir()
    cache = Cache(None, events, shared=[DirectoryLayer(tmp_path / "other")])
    assert cache.publish("artifact", key, META, BLOBS).unstored == ("all layers are only read",)
    written = Cache(tmp_path / "own", events, shared=cache.layers)
    assert not written.keeps_nothing
    assert written.publish("artifact", key, META, BLOBS).unstored == ()


def test_files_of_an_unstored_entry_are_removed_with_the_cache(events, key):
    off = Cache(None, events)
    path = off.path(off.publish("artifact", key, {}, BLOBS), "code.py")
    assert path.name == "code.py"
    del off
    assert not path.parent.exists()


def test_counters_and_events_of_a_lookup_and_a_publish(cache, events, key):
    cache.lookup("artifact", key)
    cache.publish("artifact", key, META, BLOBS)
    cache.lookup("artifact", key)
    size = sum(map(len, BLOBS.values()))
    expected = {
        "cache.miss": 1,
        "cache.miss.absent": 1,
        "cache.hit": 1,
        "cache.hit.private": 1,
        "cache.published": 1,
        "cache.bytes_written": size,
        "cache.bytes_read": size,
    }
    assert expected.items() <= events.counters.items()
    assert 0 < events.counters["cache.milliseconds_saved"] <= 2500
    assert [event.name for event in events.events] == ["cache.miss", "cache.publish", "cache.hit"]


@pytest.mark.parametrize("meta", [{}, {"compile_seconds": 0.0}, {"compile_seconds": "long"}])
def test_nothing_is_saved_where_nothing_was_spent(cache, events, key, meta):
    cache.publish("artifact", key, meta, BLOBS)
    cache.lookup("artifact", key)
    assert "cache.milliseconds_saved" not in events.counters


def test_moved_directory_still_hits_c1_vllm_47573(cache, root, tmp_path, events, key):
    cache.publish("artifact", key, META, BLOBS)
    root.rename(tmp_path / "elsewhere")
    assert isinstance(Cache(tmp_path / "elsewhere", events).lookup("artifact", key), Entry)
