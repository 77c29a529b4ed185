"""The cache that the settings describe: layers and trust, limits, and no directory."""

import ctypes
import os
from functools import partial

import pytest
import torch

from piecegraph import Config, Events, explain_miss, prepare
from piecegraph.cache import Cache, Entry, Key
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.lock import Flight
from piecegraph.cache.remote import RemoteLayer
from piecegraph.cache.signing import SigningKey, trust_all, write_keys
from piecegraph.compile.bundle.key_factors import documented
from piecegraph.errors import BundleMissing, KeysMissing, UntrustedDirectory
from piecegraph.runtime.setup.open_cache import open_cache
from piecegraph.tools.cache_image import export_image
from piecegraph.tools.cache_import import import_image

from ..cache.children import fork, status

KEY = Key.of("trace", {"model": "m"})


def filled(root):
    return Cache(root, Events()).publish("bundle", KEY, {}, {"plan.json": b"{}"})


def found(**settings):
    return open_cache(Config(**settings), Events()).lookup("bundle", KEY)


def test_shared_directory_is_trusted_as_configured(tmp_path):
    entry = filled(tmp_path / "image")
    at = str(tmp_path / "image")

    def with_layer(number, **layer):
        return found(cache_dir=tmp_path / str(number), cache={"layers": ({"at": at, **layer},)})

    assert with_layer(1, trust="anybody").layer == f"shared:{at}"
    assert with_layer(2, trust="pinned", digests=(entry.digest,)).digest == entry.digest
    assert with_layer(3, trust="pinned", digests=("0" * 64,)).reason == "untrusted"


def test_signed_layer_needs_a_key_and_a_signature(tmp_path, monkeypatch):
    filled(tmp_path / "image")
    settings = {"cache_dir": tmp_path / "own", "cache": {"layers": (str(tmp_path / "image"),)}}
    with pytest.raises(KeysMissing, match="PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE"):
        found(**settings)
    (tmp_path / "trusted").write_text(SigningKey.new().public.line())
    monkeypatch.setenv("PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE", str(tmp_path / "trusted"))
    assert found(**settings).reason == "untrusted"


def test_url_is_written_back_signed_and_read_by_another_machine(tmp_path, monkeypatch):
    write_keys(SigningKey.new(), tmp_path / "key")
    monkeypatch.setenv("PIECEGRAPH_CACHE_SIGNING_KEY_FILE", str(tmp_path / "key"))
    url = f"file://{tmp_path}/bucket"
    writer = Config(
        cache_dir=tmp_path / "one", cache={"layers": ({"at": url, "write_back": True},)}
    )
    assert open_cache(writer, Events()).publish("bundle", KEY, {}, {"plan.json": b"{}"}).signature
    monkeypatch.delenv("PIECEGRAPH_CACHE_SIGNING_KEY_FILE")
    monkeypatch.setenv("PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE", str(tmp_path / "key.pub"))
    assert found(cache_dir=tmp_path / "two", cache={"layers": (url,)}).layer == f"remote:{url}"


@pytest.mark.parametrize("directory", ["file/cache", "a\0b", "cache in a folder that is gone"])
def test_a_directory_that_cannot_be_is_an_event_and_why_there_is_no_entry(
    tmp_path, monkeypatch, directory
):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder" if "gone" in directory else tmp_path)
    (tmp_path / "folder").rmdir()
    events = Events()
    cache = open_cache(Config(cache_dir=directory), events)
    assert cache.private is None
    (event,) = events.named("cache.unusable")
    missed = cache.lookup("bundle", KEY)
    assert missed.reason == "disabled"
    if directory == "file/cache":
        assert "Choose another directory" in event.facts["reason"]
        assert "Not a directory" in missed.detail


def test_directory_on_a_read_only_file_system_is_read(tmp_path):
    """As in a container with a read-only root file system."""
    filled(tmp_path / "own")
    ended = status(fork(partial(remount_and_look_up, tmp_path / "own")))
    if ended == SKIPPED:
        pytest.skip("this process may not mount")
    assert ended == 0


SKIPPED = 77


def remount_and_look_up(root):
    """In a mount namespace of this process; exits with SKIPPED where that is not allowed."""
    events = Events()
    libc = ctypes.CDLL(None, use_errno=True)
    bind, remount, private = 4096, 4096 | 32 | 1, 1 << 18
    at = str(root).encode()
    if (
        libc.unshare(0x20000)
        or libc.mount(None, b"/", None, private | 16384, None)
        or libc.mount(at, at, None, bind, None)
        or libc.mount(None, at, None, remount, None)
    ):
        os._exit(SKIPPED)
    cache = open_cache(Config(cache_dir=root), events)
    hit = cache.lookup("bundle", KEY)
    assert isinstance(hit, Entry), hit
    assert hit.layer == "private"
    assert cache.path(hit, "plan.json").read_bytes() == b"{}"
    assert "Read-only file system" in events.named("cache.read_only")[0].facts["reason"]
    other = Key.of("trace", {"model": "other"})
    cache.publish("bundle", other, {}, {"plan.json": b"{}"})
    assert not events.counters["cache.publish_failed"]
    cache.evict()
    with cache.single_flight("bundle", other) as flight:
        assert flight is Flight.UNLOCKED


def test_directory_open_to_others_is_refused_with_the_command_that_fixes_it(tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(UntrustedDirectory, match="chmod 700"):
        open_cache(Config(cache_dir=tmp_path / "open"), Events())


class Doubling(torch.nn.Module):
    def __init__(self, gain=2):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return x * self.gain


SETTINGS = {"inputs": {"x": "float32[num_tokens, 8]"}, "max_num_tokens": 32}


def test_why_of_a_cache_without_entries(tmp_path):
    answer = explain_miss(Doubling(), Config(cache_dir=tmp_path, **SETTINGS))
    assert (answer.reason, answer.nearest) == ("absent", ())
    assert not (tmp_path / "statistics").exists(), "nothing was started"
    assert explain_miss(Doubling(), Config(cache=False, **SETTINGS)).reason == "disabled"


class Fleet:
    """A bundle of `Doubling` at a URL, and a machine with an empty directory that asks for it."""

    def __init__(self, directory):
        self.bucket = directory / "bucket"
        self.url = f"file://{self.bucket}"
        layers = ({"at": self.url, "trust": "anybody"},)
        self.config = Config(cache_dir=directory / "own", cache={"layers": layers}, **SETTINGS)
        self.store({"conditions": "none"})

    def store(self, meta):
        key = explain_miss(Doubling(), self.config).key
        assert key is not None
        writer = RemoteLayer(self.url, trust_all, write_back=True)
        Cache(None, Events(), shared=[writer]).publish("bundle", key, meta, {"plan.json": b"{}"})

    def missing(self, **changes):
        """The error of a start that may use nothing but its bundle; it says what `why` says."""
        config = self.config.changed(**changes)
        answer = explain_miss(Doubling(), config)
        with pytest.raises(BundleMissing) as caught:
            prepare(Doubling(), config.changed(bundle="force"))
        assert answer.reason is not None
        assert answer.reason in str(caught.value)
        assert answer.remedy in str(caught.value)
        for near in answer.nearest[:1]:
            assert documented(near.differences[0]) in str(caught.value)
        return str(caught.value)


@pytest.fixture
def fleet(tmp_path):
    return Fleet(tmp_path)


def test_a_miss_names_the_settings_that_differ_from_a_bundle_at_a_url(fleet):
    message = fleet.missing(max_num_tokens=33)
    assert "absent: the nearest differs in max_num_tokens: 32 -> 33" in message
    assert "Deploy a bundle built from this model with these settings." in message


def test_a_refused_bundle_is_explained_by_its_conditions_alone(fleet):
    answer = explain_miss(Doubling(), fleet.config)
    assert str(answer).splitlines()[1:] == []
    assert answer.reason.startswith("refused: ")
    assert answer.nearest == ()


@pytest.mark.parametrize(
    ("fault", "reason", "advice"),
    [
        (PermissionError("Forbidden"), "unreadable: PermissionError: Forbidden", "credentials"),
        (ConnectionError("no route"), "unreadable: ConnectionError: no route", "network"),
        (b"<html>", "damaged: manifest: ", "its bytes have changed"),
    ],
)
def test_a_layer_that_fails_is_named_with_advice_that_fits(
    fleet, monkeypatch, fault, reason, advice
):
    def fetch(layer, path, size):
        if isinstance(fault, bytes):
            return fault
        raise fault

    monkeypatch.setattr(RemoteLayer, "_fetch", fetch)
    message = fleet.missing()
    assert reason in message
    assert f"in remote:{fleet.url}" in message
    assert advice in message
    assert "Deploy" not in message


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")
def test_why_and_shipping_of_one_bundle(tmp_path):
    config = Config(cache_dir=tmp_path / "built", graph_mode="NONE", **SETTINGS)
    prepare(Doubling(), config).close()
    assert explain_miss(Doubling(), config).reason is None
    other = explain_miss(Doubling(), config.changed(max_num_tokens=33))
    names = [difference.name for difference in other.nearest[0].differences]
    assert names == ["config.max_num_tokens"]
    assert "  max_num_tokens: 32 -> 33" in str(other)

    entry = Cache(tmp_path / "built", Events()).lookup(
        "bundle", explain_miss(Doubling(), config).key
    )
    assert isinstance(entry, Entry)
    source = DirectoryLayer(tmp_path / "built")
    export_image([entry.manifest], source, tmp_path / "one.tar")
    shipped = Cache(tmp_path / "shipped", Events())
    for imported in import_image(tmp_path / "one.tar", trust_all):
        shipped.store(imported)
    served = prepare(Doubling(), config.changed(cache_dir=tmp_path / "shipped", bundle="force"))
    assert served.compiled.from_bundle
