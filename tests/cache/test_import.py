"""Import of an image: hostile files are refused before anything of them is used."""

import hashlib
import json
import os
import pickle
import random
import resource
import tarfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.cache import Cache, Key, inspection
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA, blob_name, entry_name
from piecegraph.cache.signing import TrustedKeys, pinned, trust_all
from piecegraph.errors import BundleRefused
from piecegraph.events import Events
from piecegraph.tools import cache_import as import_module
from piecegraph.tools.cache_image import ROOT, export_image
from piecegraph.tools.cache_import import Image, import_image

from .children import run_all
from .conftest import BLOBS, META


@pytest.fixture
def entries(cache, key):
    plan = {"plan.json": b"{}", "code.py": BLOBS["code.py"], "empty": b""}
    return [
        cache.publish("bundle", Key.of("trace", {"model": "decoder"}), {"n": 1}, plan),
        cache.publish("artifact", key, META, BLOBS),
    ]


@pytest.fixture(params=["tar", "directory"])
def file(request, tmp_path, entries, signer):
    path = tmp_path / ("model.tar" if request.param == "tar" else "model")
    export(entries, path, signer)
    return path


@pytest.fixture
def tar(tmp_path, entries, signer):
    export(entries, tmp_path / "model.tar", signer)
    return tmp_path / "model.tar"


def export(entries, path, signer=None):
    source = DirectoryLayer(path.parent / "cache", trust_all)
    export_image([entry.manifest for entry in entries], source, path, signer)


def test_export_and_import(file, entries, tmp_path, trusted):
    cache = Cache(tmp_path / "other", Events())
    for entry in import_image(file, trusted.refuses):
        cache.store(entry)
    for entry in entries:
        found = cache.lookup(entry.manifest.kind, entry.key)
        assert (found.contents, found.digest) == (entry.contents, entry.digest)


def test_others_can_read_it_as_the_umask_says(entries, tmp_path):
    before = os.umask(0o022)
    try:
        export(entries, tmp_path / "model.tar")
    finally:
        os.umask(before)
    assert (tmp_path / "model.tar").stat().st_mode & 0o777 == 0o644


def test_a_link_to_a_bundle_stays_one(entries, tmp_path):
    (tmp_path / "link.tar").symlink_to(tmp_path / "model.tar")
    export(entries, tmp_path / "link.tar")
    assert (tmp_path / "link.tar").is_symlink()
    assert len(list(import_image(tmp_path / "model.tar", trust_all))) == 2


def test_only_trusted_files_are_imported(file, entries, tmp_path, trusted):
    with pytest.raises(BundleRefused, match="is not trusted here"):
        import_image(file, TrustedKeys({}).refuses)
    export(entries, tmp_path / "unsigned.tar")
    with pytest.raises(BundleRefused, match="not signed"):
        import_image(tmp_path / "unsigned.tar", trusted.refuses)
    all_pinned = pinned({entry.digest for entry in entries})
    with pytest.raises(BundleRefused, match="not pinned"):
        import_image(tmp_path / "unsigned.tar", pinned({entries[0].digest}))
    assert len(list(import_image(tmp_path / "unsigned.tar", all_pinned))) == 2


def test_an_image_of_an_image_is_the_same(tar, tmp_path, signer, trusted):
    """Without a key to sign with, entries keep their signatures."""
    image = Image(tar, trusted.refuses)
    export_image(image.manifests, image, tmp_path / "copy.tar")
    assert (tmp_path / "copy.tar").read_bytes() == tar.read_bytes()


def test_damage_is_refused_or_touches_no_entry(tar, entries, trusted):
    content = tar.read_bytes()
    chance = random.Random(2)
    cuts = [content[: chance.randrange(len(content) - 2048)] for _ in range(100)]
    flips = []
    for _ in range(600):
        at = chance.randrange(len(content))
        flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
        flips.append(content[:at] + flipped + content[at + 1 :])
    refusals = 0
    for bad in cuts + flips:
        tar.write_bytes(bad)
        try:
            found = list(import_image(tar, trusted.refuses))
        except BundleRefused:
            refusals += 1
        else:
            assert {each.digest for each in found} == {each.digest for each in entries}
    assert refusals > 400


@given(st.binary(max_size=600))
def test_parser_handles_any_bytes(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any"
    for prefix in (b"", member("index.json", b"{}"), member("index.json", content)):
        path.write_bytes(prefix + content)
        with pytest.raises(BundleRefused):
            import_image(path, trust_all)


def member(name, content, size=None):
    """A file of a tar; `size` is what its header says."""
    info = tarfile.TarInfo(name)
    info.size = len(content) if size is None else size
    form = tarfile.USTAR_FORMAT if 0 <= info.size < 1 << 33 else tarfile.GNU_FORMAT
    return info.tobuf(form) + content + bytes(-len(content) % 512)


def blob(content):
    digest = hashlib.sha256(content).hexdigest()
    described = {"digest": f"sha256:{digest}", "size": len(content)}
    return described, member(f"blobs/sha256/{digest}", content)


def image(layers, *blobs):
    """A tar of an image with these layers."""
    described, manifest = blob(json.dumps({"layers": layers}).encode())
    return member("index.json", json.dumps({"manifests": [described]}).encode()) + b"".join(
        (manifest, *blobs)
    )


def refused(path, content):
    path.write_bytes(content)
    with pytest.raises(BundleRefused) as refusal:
        import_image(path, trust_all)
    return str(refusal.value.facts["reason"])


def test_sizes_that_lie_are_refused_before_anything_is_read(tmp_path):
    """Sizes are exact and nothing is compressed, so a small file cannot expand."""
    path = tmp_path / "bomb"
    for size in (1 << 62, 1 << 31, 513, -1):
        assert "would have" in refused(path, member("index.json", b"x", size))
        layer, content = blob(member(f"{ROOT}/{blob_name('0' * 64)}", b"x", size))
        assert "would have" in refused(path, image([layer], content))


@pytest.mark.parametrize(
    "index",
    [
        b"[]", b"{}", b"null", b"1", b'{"manifests": 1}', b'{"manifests": [1]}', b"?",
        b'{"manifests": [{"digest": "md5:0"}]}', b'{"manifests": [{"digest": 1}]}',
        b'{"manifests": [{"digest": "sha256:../../../etc/passwd"}]}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_malformed_descriptors_are_refused(tmp_path, index):
    refused(tmp_path / "x", member("index.json", index))


def test_layers_are_those_of_their_digests_and_hold_entries(tmp_path, entries):
    path, layer = tmp_path / "x", member(f"{ROOT}/other", b"")
    described, content = blob(layer)
    assert "it holds no entries" in refused(path, image([described], content))
    assert "is not in it" in refused(path, image([described]))
    assert "other bytes" in refused(path, image([described], content.replace(b"other", b"OTHER")))
    assert refused(
        path, image([blob(b"\x1f\x8b" + bytes(600))[0]], blob(b"\x1f\x8b" + bytes(600))[1])
    )
    manifest = (tmp_path / "cache" / entry_name("artifact", entries[1].key.digest)).read_bytes()
    for name in ("bundle/00/" + "0" * 64, "artifact/00/" + entries[1].key.digest, "..///x", "x"):
        described, content = blob(member(f"{ROOT}/{ENTRY_AREA}/{name}", manifest))
        assert refused(path, image([described], content))
    right = entry_name("artifact", entries[1].key.digest)
    described, content = blob(member(f"{ROOT}/{right}", manifest))
    assert "is missing" in refused(path, image([described], content))


def test_very_many_files_are_refused(tar, monkeypatch):
    monkeypatch.setattr(import_module, "MAX_FILES", 3)
    with pytest.raises(BundleRefused, match="more than 3 files"):
        import_image(tar, trust_all)


def test_links_in_a_directory_are_refused(entries, tmp_path):
    export(entries, tmp_path / "model")
    index = tmp_path / "model" / "index.json"
    index.rename(tmp_path / "index.json")
    index.symlink_to(tmp_path / "index.json")
    with pytest.raises(BundleRefused, match="symbolic link"):
        import_image(tmp_path / "model", trust_all)


def test_more_entries_than_layers_can_be_mounted(tmp_path, cache):
    many = [
        cache.publish("artifact", Key.of("codegen", {"n": n}), {}, {"x": b"%d" % n})
        for n in range(130)
    ]
    export(many, tmp_path / "many.tar")
    found = {entry.digest for entry in import_image(tmp_path / "many.tar", trust_all)}
    assert found == {entry.digest for entry in many}
    with tarfile.open(tmp_path / "many.tar") as tar:
        assert len(tar.getnames()) == 100 + 4


def test_file_larger_than_the_limit_is_refused(file, monkeypatch):
    monkeypatch.setattr(import_module, "MAX_IMAGE_BYTES", 100)
    with pytest.raises(BundleRefused, match="more than 100"):
        import_image(file, trust_all)


def test_pickles_and_archives_are_refused(tmp_path):
    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    for content in (pickle.dumps(Payload()), b"PK\3\4" + bytes(600), b"\x1f\x8b" + bytes(600)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(BundleRefused):
            import_image(tmp_path / "x", trust_all)
    assert not (tmp_path / "executed").exists()


def test_missing_file_is_refused_with_the_reason(tmp_path):
    with pytest.raises(BundleRefused, match="No such file"):
        import_image(tmp_path / "none", trust_all)


def test_link_to_a_bundle_may_be_imported(file, tmp_path):
    """Mounted files of a container are often links, and the user has named this one."""
    (tmp_path / "link.tar").symlink_to(file)
    assert len(list(import_image(tmp_path / "link.tar", trust_all))) == 2


def test_imported_names_stay_inside_the_cache(tmp_path, file):
    root = tmp_path / "other"
    cache = Cache(root, Events())
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(root)}
    for entry in import_image(file, trust_all):
        cache.store(entry)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(root)} == before
    for path in (root / BLOB_AREA).rglob("*"):
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def peak_bytes(work):
    """How much more memory a child has at its peak with `work` than without."""
    peaks = []
    for run in (lambda: None, work):
        read, write = os.pipe()

        def measure(run=run, write=write):
            run()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            os.write(write, str(peak).encode())

        assert run_all([measure]) == [0]
        peaks.append(int(os.read(read, 32)))
        os.close(read)
        os.close(write)
    return peaks[1] - peaks[0]


def test_large_file_that_is_no_bundle_is_refused_by_its_header(tmp_path):
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 30)

    def refuse():
        with pytest.raises(BundleRefused, match="no OCI image layout"):
            import_image(tmp_path / "x", trust_all)

    assert peak_bytes(refuse) < 64 << 20


@pytest.mark.slow
def test_export_and_import_hold_one_entry_in_memory(tmp_path, memory_root):
    cache = Cache(memory_root, Events())
    for number in range(8):
        blobs = {"x": random.Random(number).randbytes(8 << 20)}
        cache.publish("artifact", Key.of("codegen", {"n": number}), {}, blobs)
    manifests = [manifest for manifest, _ in inspection.manifests(memory_root)]

    def ship():
        export_image(manifests, DirectoryLayer(memory_root), tmp_path / "all.tar")
        other = Cache(memory_root.parent / "other", Events())
        for entry in import_image(tmp_path / "all.tar", trust_all):
            other.store(entry)

    assert peak_bytes(ship) < 40 << 20
    assert len(list((memory_root.parent / "other" / ENTRY_AREA).rglob("*/*/*"))) == 8


def test_only_the_entries_that_are_asked_for_are_imported(file, entries):
    (entry,) = import_image(file, trust_all, only={entries[1].digest})
    assert entry.digest == entries[1].digest
    with pytest.raises(BundleRefused, match="no entry with digest 0000"):
        import_image(file, trust_all, only={entries[1].digest, "0" * 64})
