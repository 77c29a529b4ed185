"""Export and import of one file: deterministic, and hostile files are refused by the parser."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.cache import Cache, Entry, Key, inspection
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.keys.factors import Json, canonical
from piecegraph.cache.manifest import encode
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA
from piecegraph.cache.signing import SigningKey, TrustedKeys, pinned, trust_all
from piecegraph.errors import BundleRefused
from piecegraph.events import Events
from piecegraph.tools import cache_export as export_module
from piecegraph.tools.cache_export import MAGIC, BundleFile, export_entries, import_entries

from .children import run_all
from .conftest import BLOBS, META


@pytest.fixture
def entries(cache: Cache, key: Key) -> list[Entry]:
    plan = {"plan.json": b"{}", "code.py": BLOBS["code.py"], "empty": b""}
    return [
        cache.publish("bundle", Key.of("trace", {"model": "decoder"}), {"n": 1}, plan),
        cache.publish("artifact", key, META, BLOBS),
    ]


@pytest.fixture
def file(tmp_path: Path, entries: list[Entry], signer: SigningKey) -> Path:
    export(entries, tmp_path / "model.bundle", signer)
    return tmp_path / "model.bundle"


def export(entries: list[Entry], path: Path, signer: SigningKey | None = None) -> None:
    source = DirectoryLayer(path.parent / "cache", trust_all)
    export_entries([entry.manifest for entry in entries], source, path, signer)


def test_export_and_import(
    file: Path, entries: list[Entry], tmp_path: Path, trusted: TrustedKeys
) -> None:
    cache = Cache(tmp_path / "other", Events())
    for entry in import_entries(file, trusted.refuses):
        cache.store(entry)
    for entry in entries:
        found = cache.lookup(entry.manifest.kind, entry.key)
        assert isinstance(found, Entry)
        assert (found.contents, found.digest) == (entry.contents, entry.digest)


def test_equal_entries_give_equal_bytes(
    file: Path, entries: list[Entry], tmp_path: Path, signer: SigningKey
) -> None:
    export(entries[::-1], tmp_path / "again", signer)
    assert (tmp_path / "again").read_bytes() == file.read_bytes()
    bundle = BundleFile(file, trust_all)
    export_entries(bundle.manifests, bundle, tmp_path / "copy", signer)
    assert (tmp_path / "copy").read_bytes() == file.read_bytes()


def test_others_can_read_it_as_the_umask_says(entries: list[Entry], tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export(entries, tmp_path / "model.bundle")
    finally:
        os.umask(before)
    assert (tmp_path / "model.bundle").stat().st_mode & 0o777 == 0o644


def test_a_link_to_a_bundle_stays_one(entries: list[Entry], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "model.bundle")
    export(entries, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert len(list(import_entries(tmp_path / "model.bundle", trust_all))) == 2


def test_shared_blobs_are_in_it_once(file: Path) -> None:
    assert file.read_bytes().count(BLOBS["code.py"]) == 1


def test_nothing_else_is_left_beside_the_file(file: Path) -> None:
    assert sorted(path.name for path in file.parent.iterdir()) == ["cache", file.name]


def test_only_trusted_files_are_imported(
    file: Path, entries: list[Entry], tmp_path: Path, trusted: TrustedKeys
) -> None:
    with pytest.raises(BundleRefused, match="is not trusted here"):
        import_entries(file, TrustedKeys({}).refuses)
    export(entries, tmp_path / "unsigned")
    with pytest.raises(BundleRefused, match="not signed"):
        import_entries(tmp_path / "unsigned", trusted.refuses)
    all_pinned = pinned({entry.digest for entry in entries})
    with pytest.raises(BundleRefused, match="not pinned"):
        import_entries(tmp_path / "unsigned", pinned({entries[0].digest}))
    assert len(list(import_entries(tmp_path / "unsigned", all_pinned))) == 2


def test_every_damage_is_refused(file: Path, trusted: TrustedKeys) -> None:
    content = file.read_bytes()
    chance = random.Random(2)
    cuts = [content[: chance.randrange(len(content))] for _ in range(200)]
    grown = [content + b"\0", content + content]
    flips = []
    for _ in range(600):
        at = chance.randrange(len(content))
        flipped = bytes([content[at] ^ 1 << chance.randrange(8)])
        flips.append(content[:at] + flipped + content[at + 1 :])
    for bad in cuts + grown + flips:
        file.write_bytes(bad)
        with pytest.raises(BundleRefused):
            import_entries(file, trusted.refuses)


@given(st.binary(max_size=300))
def test_parser_handles_any_bytes(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any"
    for prefix in (b"", MAGIC):
        path.write_bytes(prefix + content)
        with pytest.raises(BundleRefused):
            import_entries(path, trust_all)


def refused(path: Path, header: Json, rest: bytes = b"") -> str:
    path.write_bytes(MAGIC + canonical(header) + b"\n" + rest)
    with pytest.raises(BundleRefused) as refusal:
        import_entries(path, trust_all)
    return str(refusal.value.facts["reason"])


def test_sizes_that_lie_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Lengths are exact and nothing is compressed, so a small file cannot expand."""
    path = tmp_path / "bomb"
    for size in (1 << 62, 1 << 31, 1):
        assert "do not add up" in refused(path, {"blobs": [["0" * 64, size]], "manifests": []})
        assert "do not add up" in refused(path, {"blobs": [], "manifests": [size]})
    for none in (-1, 1.0, True, None, "1"):
        assert "invalid size" in refused(path, {"blobs": [["0" * 64, none]], "manifests": []})
        assert "invalid size" in refused(path, {"blobs": [], "manifests": [none]})


@pytest.mark.parametrize(
    "header",
    [
        [],
        {},
        None,
        {"blobs": {}, "manifests": 1},
        {"blobs": [["../../etc/passwd", 0]], "manifests": []},
        {"blobs": [["0" * 64]], "manifests": []},
        {"blobs": 1, "manifests": []},
        {"blobs": [[[], 0]], "manifests": []},
        {"blobs": [], "manifests": [], "more": 1},
    ],
)
def test_malformed_headers_are_refused(tmp_path: Path, header: Json) -> None:
    refused(tmp_path / "x", header)


def test_header_must_be_canonical(tmp_path: Path) -> None:
    for line in (b'{"blobs": [], "manifests": []}', b'{"manifests":[],"blobs":[]}', b'{"x":NaN}'):
        (tmp_path / "x").write_bytes(MAGIC + line + b"\n")
        with pytest.raises(BundleRefused, match=r"form"):
            import_entries(tmp_path / "x", trust_all)


def test_blob_that_is_not_in_the_file_is_refused(tmp_path: Path, entries: list[Entry]) -> None:
    manifest = encode(entries[0].manifest)
    assert "is not in it" in refused(
        tmp_path / "x", {"blobs": [], "manifests": [len(manifest)]}, manifest
    )


def test_file_larger_than_the_limit_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "MAX_BUNDLE_BYTES", 100)
    with pytest.raises(BundleRefused, match="more than 100"):
        import_entries(file, trust_all)


def test_pickles_and_archives_are_refused(tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, ...]:
            return Path.touch, (tmp_path / "executed",)

    for content in (pickle.dumps(Payload()), b"PK\3\4" + bytes(100), b"\x1f\x8b" + bytes(100)):
        (tmp_path / "x").write_bytes(content)
        with pytest.raises(BundleRefused):
            import_entries(tmp_path / "x", trust_all)
    assert not (tmp_path / "executed").exists()


def test_missing_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(BundleRefused, match="No such file"):
        import_entries(tmp_path / "none", trust_all)


def test_link_to_a_bundle_may_be_imported(file: Path, tmp_path: Path) -> None:
    """Mounted files of a container are often links, and the user has named this one."""
    (tmp_path / "link").symlink_to(file)
    assert len(list(import_entries(tmp_path / "link", trust_all))) == 2


def test_imported_names_stay_inside_the_cache(tmp_path: Path, file: Path) -> None:
    root = tmp_path / "other"
    cache = Cache(root, Events())
    before = {path for path in tmp_path.rglob("*") if not path.is_relative_to(root)}
    for entry in import_entries(file, trust_all):
        cache.store(entry)
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(root)} == before
    for path in (root / BLOB_AREA).rglob("*"):
        if path.is_file():
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name


def peak_bytes(work: Callable[[], None]) -> int:
    """How much more memory a child has at its peak with `work` than without."""
    peaks = []
    for run in (lambda: None, work):
        read, write = os.pipe()

        def measure(run: Callable[[], None] = run, write: int = write) -> None:
            run()
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            os.write(write, str(peak).encode())

        assert run_all([measure]) == [0]
        peaks.append(int(os.read(read, 32)))
        os.close(read)
        os.close(write)
    return peaks[1] - peaks[0]


def test_large_file_that_is_no_bundle_is_refused_by_its_header(tmp_path: Path) -> None:
    with (tmp_path / "x").open("wb") as file:
        file.truncate(1 << 30)

    def refuse() -> None:
        with pytest.raises(BundleRefused, match="not a piecegraph bundle"):
            import_entries(tmp_path / "x", trust_all)

    assert peak_bytes(refuse) < 64 << 20


@pytest.mark.slow
def test_export_and_import_hold_one_entry_in_memory(tmp_path: Path, memory_root: Path) -> None:
    cache = Cache(memory_root, Events())
    for number in range(12):
        blobs = {"x": random.Random(number).randbytes(16 << 20)}
        cache.publish("artifact", Key.of("codegen", {"n": number}), {}, blobs)
    manifests = [manifest for manifest, _ in inspection.manifests(memory_root)]

    def ship() -> None:
        export_entries(manifests, DirectoryLayer(memory_root), tmp_path / "all")
        other = Cache(memory_root.parent / "other", Events())
        for entry in import_entries(tmp_path / "all", trust_all):
            other.store(entry)

    assert peak_bytes(ship) < 80 << 20
    assert len(list((memory_root.parent / "other" / ENTRY_AREA).rglob("*/*/*"))) == 12


@pytest.mark.parametrize(
    ("limit", "part"), [("MAX_HEADER_BYTES", "header"), ("MAX_BUNDLE_BYTES", "file")]
)
def test_export_that_no_import_would_accept_is_refused(
    file: Path, entries: list[Entry], monkeypatch: pytest.MonkeyPatch, limit: str, part: str
) -> None:
    before = file.read_bytes()
    monkeypatch.setattr(export_module, limit, 100)
    with pytest.raises(OSError, match=f"its {part} would have"):
        export(entries, file)
    assert file.read_bytes() == before


def test_only_the_entries_that_are_asked_for_are_imported(file: Path, entries: list[Entry]) -> None:
    (entry,) = import_entries(file, trust_all, only={entries[1].digest})
    assert entry.digest == entries[1].digest
    with pytest.raises(BundleRefused, match="no entry with digest 0000"):
        import_entries(file, trust_all, only={entries[1].digest, "0" * 64})
