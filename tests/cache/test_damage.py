"""Failure W7: with any damage to the files, a lookup gives the entry or a miss."""

import hashlib
import json
import os
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.cache import Cache, Entry, Key, Miss
from piecegraph.cache.keys.factors import canonical
from piecegraph.cache.manifest import BadManifest, BlobRef, decode
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA, blob_name, entry_name
from piecegraph.errors import InvalidEntry
from piecegraph.events import Events
from piecegraph.tools.cache_verify import exit_status, verify

from .conftest import BLOBS, META


def files_of(root):
    areas = (root / ENTRY_AREA, root / BLOB_AREA)
    return sorted(path for area in areas for path in area.rglob("*") if path.is_file())


def assert_miss_then_repaired(cache, key, expected):
    missed = cache.lookup("artifact", key)
    assert missed.reason in ("damaged", "incomplete", "absent"), missed
    cache.publish("artifact", key, META, expected)
    repaired = cache.lookup("artifact", key)
    assert (repaired.contents, repaired.meta) == (expected, META)


@pytest.mark.slow
@pytest.mark.parametrize("cases", [300, pytest.param(2100, marks=pytest.mark.heavy)])
def test_failure_W7_damaged_files(memory_root, key, cases):
    """Flips, truncations, growth, swaps and removals, applied to random files."""
    chance = random.Random(1)
    cache = Cache(memory_root, Events())
    cache.publish("artifact", key, META, BLOBS)
    for case in range(cases):
        file, *others = chance.sample(files_of(memory_root), 2)
        before = file.read_bytes()
        after = damaged(before, others[0].read_bytes(), case % 5, chance)
        file.unlink() if after is None else file.write_bytes(after)
        if after != before:
            assert_miss_then_repaired(cache, key, BLOBS)
            if case % 100 == 0:
                empty(memory_root / "quarantine")


def damaged(before, other, how, chance):
    at = chance.randrange(len(before))
    if how == 0:
        return before[:at] + bytes([before[at] ^ (1 << chance.randrange(8))]) + before[at + 1 :]
    if how == 1:
        return before[:at]
    if how == 2:
        return before + chance.randbytes(chance.randrange(1, 9))
    if how == 3:
        return other
    return None


def empty(quarantine):
    for path in sorted(quarantine.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def test_failure_W7_every_bit_of_the_manifest(memory_root, key):
    cache = Cache(memory_root, Events())
    cache.publish("artifact", key, META, BLOBS)
    content = (memory_root / entry_name("artifact", key.digest)).read_bytes()
    for bit in range(len(content) * 8):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadManifest):
            decode(bytes(flipped))


def test_failure_W7_damage_is_quarantined_with_its_reason(cache, root, events, key):
    entry = cache.publish("artifact", key, META, BLOBS)
    name = blob_name(entry.manifest.blobs["kernel.so"].sha256)
    (root / name).write_bytes(bytes(1024))

    missed = cache.lookup("artifact", key)

    assert missed == Miss("damaged", "blob kernel.so has other bytes", "private", name)
    (kept,) = (root / "quarantine").iterdir()
    assert (kept / "file").read_bytes() == bytes(1024)
    assert json.loads((kept / "reason.json").read_text())["name"] == name
    assert events.counters["cache.quarantined"] == 1
    gone = Miss("incomplete", "blob kernel.so is missing", "private")
    assert cache.lookup("artifact", key) == gone


def test_repaired_entry_is_not_quarantined(cache, root, key):
    """Another process may have repaired what this one found damaged."""
    cache.publish("artifact", key, META, BLOBS)
    assert cache.private is not None
    for file in files_of(root):
        assert not cache.private.quarantine(str(file.relative_to(root)), "was damaged")
    assert isinstance(cache.lookup("artifact", key), Entry)
    assert list((root / "quarantine").iterdir()) == []


def test_damage_that_another_process_has_quarantined_is_not_reported(cache, root, key):
    assert not cache.private.quarantine(entry_name("artifact", key.digest), "was damaged")
    assert list((root / "quarantine").iterdir()) == []


def test_failure_W5_manifest_of_another_key_is_not_trusted(cache, root, key):
    other = Key.of("codegen", {"piece": "another"})
    cache.publish("artifact", key, META, BLOBS)
    cache.publish("artifact", other, META, {"code.py": b"wrong"})
    theirs = (root / entry_name("artifact", other.digest)).read_bytes()
    (root / entry_name("artifact", key.digest)).write_bytes(theirs)
    assert_miss_then_repaired(cache, key, BLOBS)


def test_failure_W6_two_instances_of_a_class_have_two_entries(cache):
    keys = [Key.of("trace", {"class": "Decoder", "weights": {"w": [n, 8]}}) for n in (64, 128)]
    for number, key in enumerate(keys):
        cache.publish("bundle", key, {}, {"plan.json": b"%d" % number})
    for number, key in enumerate(keys):
        found = cache.lookup("bundle", key)
        assert found.contents == {"plan.json": b"%d" % number}


@pytest.mark.parametrize("make", ["link", "link out", "directory", "pipe", "dangling"])
def test_irregular_file_is_a_miss(cache, root, tmp_path, key, make):
    """No link is followed out of the directory, and a pipe does not block."""
    cache.publish("artifact", key, META, BLOBS)
    for file in files_of(root):
        secret = tmp_path / "outside"
        secret.write_bytes(file.read_bytes())
        file.unlink()
        if make == "link":
            file.symlink_to(files_of(root)[0])
        elif make == "link out":
            file.symlink_to(secret)
        elif make == "dangling":
            file.symlink_to("nowhere")
        elif make == "directory":
            file.mkdir()
        else:
            os.mkfifo(file)
        assert_miss_then_repaired(cache, key, BLOBS)


def test_huge_file_is_a_miss_and_is_not_read(cache, root, key):
    """A sparse file of one tebibyte is cheap to make and would not fit into memory."""
    cache.publish("artifact", key, META, BLOBS)
    for file in files_of(root):
        os.truncate(file, 1 << 40)
        assert_miss_then_repaired(cache, key, BLOBS)


@pytest.mark.parametrize("make", ["short", "link", "other bytes"])
def test_publish_does_not_rely_on_a_damaged_blob(cache, root, tmp_path, key, make):
    entry = cache.publish("artifact", key, META, BLOBS)
    for ref in entry.manifest.blobs.values():
        blob = root / blob_name(ref.sha256)
        if make == "short":
            os.truncate(blob, 1)
        elif make == "other bytes":
            blob.write_bytes(bytes(ref.size))
        else:
            blob.unlink()
            blob.symlink_to("x" * ref.size if ref.size < 200 else tmp_path)
    published = cache.publish("bundle", key, META, BLOBS)
    for name, content in BLOBS.items():
        assert cache.path(published, name).read_bytes() == content
    assert isinstance(cache.lookup("bundle", key), Entry)


def test_hostile_pickle_in_a_blob_is_never_loaded(cache, root, tmp_path, key):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    cache.publish("artifact", key, META, BLOBS)
    for file in files_of(root):
        file.write_bytes(pickle.dumps(Payload()))
        assert_miss_then_repaired(cache, key, BLOBS)
    assert not (tmp_path / "executed").exists()


@given(st.binary(max_size=400))
def test_parser_handles_any_bytes(content):
    with pytest.raises(BadManifest):
        decode(content)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


def sealed(fields):
    """A manifest file of `fields` with a correct digest."""
    line = canonical(fields)
    return b"%s\nsha256 %s\n" % (line, hashlib.sha256(line).hexdigest().encode())


GOOD = {
    "blobs": {"x": {"sha256": "0" * 64, "size": 1}},
    "factors": {},
    "key": Key.of("codegen", {}).digest,
    "key_kind": "codegen",
    "kind": "artifact",
    "meta": {},
    "schema": 2,
}


def test_sealed_good_fields_are_a_manifest():
    assert decode(sealed(GOOD))[0].kind == "artifact"


@given(json_values)
def test_parser_handles_any_json_with_a_right_digest(fields):
    with pytest.raises(BadManifest):
        decode(sealed(fields))


@given(st.sampled_from(sorted(GOOD)), json_values)
def test_parser_handles_any_value_of_any_field(field, value):
    """A forged field is refused unless the result is another valid manifest."""
    content = sealed(GOOD | {field: value})
    try:
        manifest, _ = decode(content)
    except BadManifest:
        return
    assert field in ("meta", "blobs", "kind") or value == GOOD[field]
    assert b"%s\nsha256 %s\n" % (manifest.line(), manifest.digest.encode()) == content


@pytest.mark.parametrize("field", [*sorted(GOOD), "extra"])
def test_missing_and_unknown_fields_are_refused(field):
    fields = {name: value for name, value in GOOD.items() if name != field}
    with pytest.raises(BadManifest):
        decode(sealed(fields if field in GOOD else GOOD | {field: 1}))


@pytest.mark.parametrize("line", [b"", b"x" * 513, b"\xff"])
def test_malformed_signatures_are_refused(line):
    """What a signature means is known to signing.py: see test_signing.py."""
    assert decode(sealed(GOOD) + b"any text\n")[1] == "any text"
    with pytest.raises(BadManifest):
        decode(sealed(GOOD) + line + b"\n")


def test_reference_with_the_digest_of_a_blob_of_another_size_is_refused():
    ref = BlobRef.of(b"abc")
    assert ref.matches(b"abc")
    assert not BlobRef(ref.sha256, 4).matches(b"abc")


@pytest.mark.parametrize(
    "blobs",
    [
        {"../../etc/passwd": {"sha256": "0" * 64, "size": 1}},
        {"x": {"sha256": "../" * 21 + "0", "size": 1}},
        {"x": {"sha256": "0" * 64, "size": -1}},
        {"x": {"sha256": "0" * 64, "size": True}},
        {"x": {"sha256": "0" * 64, "size": 1.0}},
        {"x": {"sha256": "0" * 64, "size": 1 << 60}},
        {"x": {"sha256": "0" * 64, "size": 1, "path": "/tmp"}},
        {"x": {"sha256": "0" * 64}},
        {"x": ["0" * 64, 1]},
        [],
    ],
)
def test_hostile_blob_references_are_refused(blobs):
    with pytest.raises(BadManifest):
        decode(sealed(GOOD | {"blobs": blobs}))


@pytest.mark.parametrize(
    "content",
    [
        b'{"a":1,"a":1}',
        b'{"a": 1}',
        b'{"b":1,"a":1}',
        b"NaN",
        b"[" * 100_000,
        b"1" * 10_000,
        b'"\xc3\xa9"',
        b"\xef\xbb\xbf{}",
    ],
)
def test_only_canonical_json_is_read(content):
    digest = hashlib.sha256(content).hexdigest().encode()
    with pytest.raises(BadManifest, match=r"JSON|canonical"):
        decode(content + b"\nsha256 " + digest + b"\n")


def test_half_a_surrogate_pair_is_refused(cache, key):
    """No output could print it."""
    with pytest.raises(BadManifest):
        decode(sealed(GOOD | {"meta": {"x": "\ud800"}}))
    assert decode(sealed(GOOD | {"meta": {"x": "\U0001f600"}}))
    with pytest.raises(InvalidEntry):
        cache.publish("artifact", key, {"x": "\ud800"}, {})


def test_damage_and_verify_agree(cache, root, key):
    cache.publish("artifact", key, META, BLOBS)
    for file in files_of(root):
        good = file.read_bytes()
        file.write_bytes(good[:-1] + b"?")
        assert exit_status(verify(root)) == 1
        file.write_bytes(good)
    assert verify(root) == []
