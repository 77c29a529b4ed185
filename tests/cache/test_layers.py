"""Shared and remote layers: trusted only if configured, copied before use; failures are misses."""

import contextlib
import http.server
import io
import shutil
import socket
import threading
import uuid

import fsspec
import pytest

from piecegraph.cache import Cache, Entry, Key, Miss
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.manifest import MAX_MANIFEST_BYTES
from piecegraph.cache.names import BLOB_AREA, ENTRY_AREA, blob_name, entry_name
from piecegraph.cache.remote import RemoteLayer, RemoteSeconds
from piecegraph.cache.signing import pinned, trust_all
from piecegraph.errors import LayerFailed
from piecegraph.events import Events

from .conftest import BLOBS, META


@pytest.fixture
def image(tmp_path, key):
    """A directory with one entry, as in a container image."""
    directory = tmp_path / "image"
    Cache(directory, Events()).publish("artifact", key, META, BLOBS)
    return directory


@pytest.fixture
def url():
    """An empty remote for one test."""
    name = f"memory://{uuid.uuid4().hex}"
    yield name
    files, base = fsspec.core.url_to_fs(name)
    if files.exists(base):
        files.rm(base, recursive=True)


def test_shared_directory_is_read_through(root, image, key):
    events = Events()
    cache = Cache(root, events, shared=[DirectoryLayer(image, trust_all)])
    found = cache.lookup("artifact", key)
    assert found.contents == BLOBS
    assert cache.path(found, "kernel.so").is_relative_to(root), "others could swap the shared file"
    shutil.rmtree(image)
    assert isinstance(cache.lookup("artifact", key), Entry)
    assert events.counters[f"cache.hit.shared:{image}"] == 1
    assert events.counters["cache.hit.private"] == 1


def test_shared_directory_alone_is_a_cache(image, key, events):
    cache = Cache(None, events, shared=[DirectoryLayer(image, trust_all)])
    assert cache.enabled
    found = cache.lookup("artifact", key)
    assert isinstance(found, Entry)
    assert not cache.path(found, "kernel.so").is_relative_to(image)


def test_shared_directory_is_never_written(root, image, key):
    (image / blob_name(other_blob(image))).write_bytes(b"damaged")
    before = {path: path.stat().st_mtime_ns for path in image.rglob("*")}
    cache = Cache(root, Events(), shared=[DirectoryLayer(image, trust_all)])
    missed = cache.lookup("artifact", key)
    assert missed.reason == "damaged"
    cache.publish("artifact", Key.of("codegen", {}), {}, BLOBS)
    assert {path: path.stat().st_mtime_ns for path in image.rglob("*")} == before


def other_blob(image):
    return next(path.name for path in (image / BLOB_AREA).rglob("*") if path.is_file())


def test_damaged_private_entry_is_repaired_from_the_next_layer(root, image, key):
    shutil.copytree(image, root)
    (root / blob_name(other_blob(root))).write_bytes(b"damaged")
    cache = Cache(root, Events(), shared=[DirectoryLayer(image, trust_all)])
    for layer in (f"shared:{image}", "private"):
        found = cache.lookup("artifact", key)
        assert found.layer == layer


def test_first_reason_other_than_absent_is_returned(root, image, key):
    shutil.copytree(image, root)
    (root / blob_name(other_blob(root))).write_bytes(b"damaged")
    shutil.rmtree(image / ENTRY_AREA)
    cache = Cache(root, Events(), shared=[DirectoryLayer(image, trust_all)])
    missed = cache.lookup("artifact", key)
    assert (missed.reason, missed.layer) == ("damaged", "private")


def test_first_layer_with_the_entry_is_used(root, tmp_path, key):
    shared = []
    for name in ("first", "second"):
        Cache(tmp_path / name, Events()).publish("artifact", key, {}, {"x": name.encode()})
        shared.append(DirectoryLayer(tmp_path / name, trust_all))
    found = Cache(root, Events(), shared=shared).lookup("artifact", key)
    assert found.contents == {"x": b"first"}


def test_untrusted_entry_is_a_miss_and_is_not_copied(root, image, key, trusted):
    cache = Cache(root, Events(), shared=[DirectoryLayer(image, trusted.refuses)])
    missed = cache.lookup("artifact", key)
    assert missed == Miss("untrusted", "it is not signed", f"shared:{image}")
    assert not (root / BLOB_AREA).exists()


def test_pinned_entry_is_trusted(root, image, key):
    entry = Cache(image, Events()).lookup("artifact", key)
    trusting = Cache(root, Events(), shared=[DirectoryLayer(image, pinned({entry.digest}))])
    assert isinstance(trusting.lookup("artifact", key), Entry)


def test_links_in_a_shared_directory_are_not_followed(root, image, tmp_path, key):
    manifest = image / entry_name("artifact", key.digest)
    manifest.rename(tmp_path / "elsewhere")
    manifest.symlink_to(tmp_path / "elsewhere")
    cache = Cache(root, Events(), shared=[DirectoryLayer(image, trust_all)])
    missed = cache.lookup("artifact", key)
    assert "symbolic link" in missed.detail
    assert manifest.is_symlink(), "a shared layer is not put into quarantine"


def test_remote_is_written_back_signed_and_read_through(url, tmp_path, key, signer, trusted):
    trust = trusted.refuses
    writing = RemoteLayer(url, trust, write_back=True, signer=signer)
    Cache(tmp_path / "one", Events(), shared=[writing]).publish("artifact", key, META, BLOBS)

    other = Cache(tmp_path / "two", Events(), shared=[RemoteLayer(url, trust)])
    for layer in (f"remote:{url}", "private"):
        found = other.lookup("artifact", key)
        assert (found.contents, found.meta, found.layer) == (BLOBS, META, layer)


def test_signed_directory_for_an_image_is_made_through_a_remote(
    root, tmp_path, key, signer, trusted
):
    layer = tmp_path / "layer"
    writing = RemoteLayer(f"file://{layer}", trust_all, write_back=True, signer=signer)
    Cache(None, Events(), shared=[writing]).publish("artifact", key, META, BLOBS)
    shared = [DirectoryLayer(layer, trusted.refuses)]
    assert isinstance(Cache(root, Events(), shared=shared).lookup("artifact", key), Entry)


def test_remote_is_read_only_by_default(url, root, key):
    Cache(root, Events(), shared=[RemoteLayer(url, trust_all)]).publish(
        "artifact", key, META, BLOBS
    )
    files, base = fsspec.core.url_to_fs(url)
    assert not files.exists(base)


def test_empty_blob_and_equal_blobs_in_a_remote(url, key):
    blobs = {"empty": b"", "a": b"same", "b": b"same"}
    cache = Cache(None, Events(), shared=[RemoteLayer(url, trust_all, write_back=True)])
    cache.publish("artifact", key, {}, blobs)
    found = cache.lookup("artifact", key)
    assert found.contents == blobs


@pytest.mark.parametrize("content", [b"", b"other", b"x" * 5000])
def test_damaged_remote_is_a_miss_and_a_write_back_repairs_it(url, key, content):
    cache = Cache(None, Events(), shared=[RemoteLayer(url, trust_all, write_back=True)])
    entry = cache.publish("artifact", key, META, BLOBS)
    files, base = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{base}/{blob_name(entry.manifest.blobs['code.py'].sha256)}", content)
    missed = cache.lookup("artifact", key)
    assert missed.reason == "damaged"
    cache.publish("artifact", key, META, BLOBS)
    assert isinstance(cache.lookup("artifact", key), Entry)


class Counting:
    """Records the requests to a file system, and can make them fail."""

    def __init__(self, remote):
        self.verbs = []
        self.failure = None
        self._files = remote._files
        remote._files = self

    def __getattr__(self, verb):
        self.verbs.append(verb)
        if self.failure is not None:
            raise self.failure
        return getattr(self._files, verb)


def test_blobs_that_a_remote_has_are_not_sent_again(url, key):
    remote = RemoteLayer(url, trust_all, write_back=True)
    counting = Counting(remote)
    cache = Cache(None, Events(), shared=[remote])
    cache.publish("artifact", key, META, BLOBS)
    assert counting.verbs.count("pipe_file") == len(BLOBS) + 1
    cache.publish("bundle", key, META, BLOBS)
    assert counting.verbs.count("pipe_file") == len(BLOBS) + 2


def test_no_more_than_a_blob_is_requested(url, key, monkeypatch):
    """A remote file may have any size; some stores refuse empty ranges, which are skipped."""
    remote = RemoteLayer(url, trust_all, write_back=True)
    cache = Cache(None, Events(), shared=[remote])
    cache.publish("artifact", key, {}, {"three": b"abc", "empty": b""})
    requested = []
    cat_file = remote._files.cat_file

    def watch(path, start, end):
        requested.append((start, end))
        return cat_file(path, start=start, end=end)

    monkeypatch.setattr(remote._files, "cat_file", watch)
    assert isinstance(cache.lookup("artifact", key), Entry)
    assert requested == [(0, MAX_MANIFEST_BYTES + 1), (0, 4)]


def test_what_a_remote_lacks_is_remembered(url, key):
    remote = RemoteLayer(url, trust_all, write_back=True)
    counting = Counting(remote)
    cache = Cache(None, Events(), shared=[remote])
    for _ in range(5):
        assert isinstance(cache.lookup("artifact", key), Miss)
    assert len(counting.verbs) == 1
    cache.publish("artifact", key, META, BLOBS)
    assert isinstance(cache.lookup("artifact", key), Entry)


def test_memory_of_what_a_remote_lacks_ends(url, key):
    remote = RemoteLayer(url, trust_all, seconds=RemoteSeconds(memory=0.0))
    reader = Cache(None, Events(), shared=[remote])
    assert isinstance(reader.lookup("artifact", key), Miss)
    writer = Cache(None, Events(), shared=[RemoteLayer(url, trust_all, write_back=True)])
    writer.publish("artifact", key, META, BLOBS)
    assert isinstance(reader.lookup("artifact", key), Entry)


@pytest.mark.parametrize("failure", [TimeoutError("late"), ConnectionError("reset"), KeyError("x")])
def test_failing_remote_is_a_miss_and_is_not_requested_again_for_a_while(url, root, key, failure):
    events = Events()
    remote = RemoteLayer(url, trust_all, write_back=True)
    counting = Counting(remote)
    counting.failure = failure
    cache = Cache(root, events, shared=[remote])
    missed = cache.lookup("artifact", key)
    assert missed.reason == "unreadable"
    entry = cache.publish("artifact", key, META, BLOBS)
    assert isinstance(cache.lookup("artifact", key), Entry)
    assert entry.contents["code.py"] == BLOBS["code.py"]
    assert len(counting.verbs) == 1
    assert events.counters["cache.publish_failed"] == 1


def test_failing_remote_raises_if_required(url, root, key):
    seconds = RemoteSeconds(memory=0.0)
    remote = RemoteLayer(url, trust_all, write_back=True, failures="raise", seconds=seconds)
    counting = Counting(remote)
    counting.failure = ConnectionError("reset")
    cache = Cache(root, Events(), shared=[remote])
    with pytest.raises(LayerFailed, match="reset"):
        cache.lookup("artifact", key)
    with pytest.raises(LayerFailed, match="reset"):
        cache.publish("artifact", key, META, BLOBS)


def test_unreadable_shared_directory_raises_if_required(root, image, key):
    manifest = image / entry_name("artifact", key.digest)
    shutil.rmtree(manifest.parent)
    manifest.parent.write_text("a file where a directory belongs")
    shared = [DirectoryLayer(image, trust_all, failures="raise")]
    with pytest.raises(LayerFailed, match="Not a directory"):
        Cache(root, Events(), shared=shared).lookup("artifact", key)


def test_a_shared_directory_that_is_not_there_is_no_empty_one(root, tmp_path, key):
    """A volume that is not mounted, or a name that is wrong."""
    missing = tmp_path / "missing"
    missed = Cache(root, Events(), shared=[DirectoryLayer(missing)]).lookup("artifact", key)
    assert missed.reason == "unreadable"
    assert "no such directory" in missed.detail
    shared = [DirectoryLayer(missing, failures="raise")]
    with pytest.raises(LayerFailed, match="no such directory"):
        Cache(root, Events(), shared=shared).lookup("artifact", key)
    missing.mkdir()
    assert Cache(root, Events(), shared=shared).lookup("artifact", key).reason == "absent"


def test_a_bucket_that_is_not_there_is_no_empty_one(bucket, key):
    for url, reason in ((f"{bucket}/empty", "absent"), (f"{bucket}-wrong/x", "unreadable")):
        missed = Cache(None, Events(), shared=[RemoteLayer(url, trust_all)]).lookup("bundle", key)
        assert missed.reason == reason, url


def test_unknown_protocol_is_a_clear_error():
    with pytest.raises(LayerFailed, match="extra `remote`"):
        RemoteLayer("nosuch://bucket/x", trust_all)


def hanging(url, **seconds):
    """A remote whose requests wait for the event, and the paths that were requested."""
    remote = RemoteLayer(url, trust_all, seconds=RemoteSeconds(memory=0.0, **seconds))
    released, paths = threading.Event(), []

    class Hanging:
        def cat_file(self, path, start, end):
            paths.append(path)
            released.wait()
            raise FileNotFoundError(path)

    remote._files = Hanging()
    return remote, released, paths


def test_remote_that_does_not_answer_is_a_miss_after_the_deadline(url, key):
    remote, released, paths = hanging(url, request=0.05)
    missed = Cache(None, Events(), shared=[remote]).lookup("artifact", key)
    assert (missed.reason, len(paths)) == ("unreadable", 1)
    assert "no answer within 0.05 s" in missed.detail
    released.set()


def test_all_requests_of_a_start_have_one_deadline(url, key):
    remote, released, paths = hanging(url, request=0.05, total=0.12)
    cache = Cache(None, Events(), shared=[remote])
    for _ in range(10):
        missed = cache.lookup("artifact", key)
        assert isinstance(missed, Miss)
    assert "all requests have taken 0.12 s" in missed.detail
    assert len(paths) <= 3
    released.set()


class Endless(http.server.BaseHTTPRequestHandler):
    """Ignores ranges and sends a file of 256 MiB to a client that reads on."""

    sent = 0

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("Content-Length", str(256 << 20))
        self.end_headers()

    def do_GET(self):
        self.do_HEAD()
        with contextlib.suppress(OSError):
            for _ in range(256):
                self.wfile.write(bytes(1 << 20))
                Endless.sent += 1

    def log_message(self, *args):
        pass


def test_file_of_a_server_that_ignores_ranges_is_not_read_to_its_end(key):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        remote = RemoteLayer(f"http://127.0.0.1:{server.server_port}", trust_all)
        missed = Cache(None, Events(), shared=[remote]).lookup("artifact", key)
    finally:
        server.shutdown()
        server.server_close()
    assert missed.reason == "damaged"
    assert Endless.sent < 64


class Answering(http.server.BaseHTTPRequestHandler):
    """Answers what the first part of a path says."""

    def do_GET(self):
        self.send_response(int(self.path.split("/")[1]))
        self.send_header("Location", self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *args):
        pass


@pytest.mark.parametrize(
    ("answer", "reason"),
    [("404", "absent"), ("500", "unreadable"), ("403", "unreadable"), ("302", "unreadable")],
)
def test_only_what_a_server_does_not_have_is_absent(key, answer, reason):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        remote = RemoteLayer(f"http://127.0.0.1:{server.server_port}/{answer}", trust_all)
        missed = Cache(None, Events(), shared=[remote]).lookup("artifact", key)
        server.shutdown()
    assert missed.reason == reason


def test_a_required_server_that_is_down_is_an_error(key):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        remote = RemoteLayer(url, trust_all, failures="raise")
        with pytest.raises(LayerFailed, match="Cannot connect"):
            Cache(None, Events(), shared=[remote]).lookup("artifact", key)


def test_http_files_are_read_only_as_far_as_needed(key, monkeypatch):
    class Files:
        def __init__(self):
            self.sizes = []

        def open(self, path, mode):
            file = io.BytesIO(b"x" * 100)
            file.read = lambda size: self.sizes.append(size) or b"x"
            return file

    files = Files()
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (files, "base"))
    layer = RemoteLayer("https://host/base", trust_all)
    assert layer.read(entry_name("artifact", key.digest), 40) == b"x"
    assert files.sizes == [41]


def test_private_hit_fills_a_remote_that_lacks_the_entry(url, root, key, signer, trusted):
    Cache(root, Events()).publish("artifact", key, META, BLOBS)
    remote = RemoteLayer(url, trusted.refuses, write_back=True, signer=signer)
    cache = Cache(root, Events(), shared=[remote])
    for _ in range(2):
        found = cache.lookup("artifact", key)
        assert found.layer == "private"
    reader = Cache(None, Events(), shared=[RemoteLayer(url, trusted.refuses)])
    assert isinstance(reader.lookup("artifact", key), Entry)


def test_private_hit_is_not_sent_to_a_remote_that_has_the_entry(url, root, key):
    """An entry that another machine has compiled with other bytes is not replaced either."""
    remote = RemoteLayer(url, trust_all, write_back=True)
    Cache(None, Events(), shared=[remote]).publish("artifact", key, META, {"code.py": b"theirs"})
    Cache(root, Events()).publish("artifact", key, META, BLOBS)
    counting = Counting(remote)
    cache = Cache(root, Events(), shared=[remote])
    for _ in range(3):
        assert isinstance(cache.lookup("artifact", key), Entry)
    assert counting.verbs == ["cat_file", "size"]


def test_private_hit_repairs_an_entry_of_a_remote_that_lost_a_blob(url, root, key):
    remote = RemoteLayer(url, trust_all, write_back=True)
    entry = Cache(root, Events(), shared=[remote]).publish("artifact", key, META, BLOBS)
    lost = entry.manifest.blobs["code.py"]
    remote.remove(blob_name(lost.sha256))
    new = Cache(None, Events(), shared=[RemoteLayer(url, trust_all)])
    missed = new.lookup("artifact", key)
    assert missed.reason == "incomplete"
    again = RemoteLayer(url, trust_all, write_back=True)
    assert isinstance(Cache(root, Events(), shared=[again]).lookup("artifact", key), Entry)
    new = Cache(None, Events(), shared=[RemoteLayer(url, trust_all)])
    assert isinstance(new.lookup("artifact", key), Entry)
