"""Entries as an OCI image: by the rules of the specification, and read where it is mounted."""

import contextlib
import hashlib
import json
import re
import shutil
import socket
import subprocess
import tarfile
import time

import pytest

from piecegraph.cache import Cache, Key
from piecegraph.cache.directory import DirectoryLayer
from piecegraph.cache.signing import TrustedKeys
from piecegraph.errors import EntryUnusable
from piecegraph.events import Events
from piecegraph.tools.cache_image import ROOT, export_image
from piecegraph.tools.cli.app import main

from .conftest import BLOBS, META

FACTORS = {
    "model": "engine.Decoder",
    "device": {"type": "cuda", "name": "H100", "capability": "9.0", "multiprocessors": 132},
    "platform": "linux x86_64",
    "versions": {"torch": "2.13.0", "piecegraph": "0.1.0"},
    "config": {"max_num_tokens": 128},
}
DIGEST = re.compile("sha256:[a-f0-9]{64}")


@pytest.fixture
def entries(cache, key):
    return [
        cache.publish("artifact", key, META, BLOBS),
        cache.publish("bundle", Key.of("trace", FACTORS), {"n": 1}, {"plan.json": b"{}", **BLOBS}),
    ]


@pytest.fixture
def image(entries, tmp_path, signer):
    write(entries, tmp_path / "image", signer)
    return tmp_path / "image"


def write(entries, path, signer=None):
    source = DirectoryLayer(path.parent / "cache")
    return export_image([entry.manifest for entry in entries], source, path, signer)


def blob(image, descriptor, media_type):
    """The file that a descriptor names; checks what the specification asks of both."""
    assert DIGEST.fullmatch(descriptor["digest"])
    assert descriptor["mediaType"] == f"application/vnd.oci.image.{media_type}"
    path = image / "blobs" / descriptor["digest"].replace(":", "/")
    content = path.read_bytes()
    assert f"sha256:{hashlib.sha256(content).hexdigest()}" == descriptor["digest"]
    assert len(content) == descriptor["size"]
    return path


def read(image):
    """Manifest, configuration and layers of an image layout with one image."""
    assert json.loads((image / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((image / "index.json").read_text())
    assert (index["schemaVersion"], len(index["manifests"])) == (2, 1)
    assert index["mediaType"] == "application/vnd.oci.image.index.v1+json"
    manifest = json.loads(blob(image, index["manifests"][0], "manifest.v1+json").read_text())
    assert index["manifests"][0]["platform"] == {"architecture": "amd64", "os": "linux"}
    config = json.loads(blob(image, manifest["config"], "config.v1+json").read_text())
    layers = [blob(image, layer, "layer.v1.tar") for layer in manifest["layers"]]
    assert {"architecture", "os", "rootfs"} <= config.keys()
    diffs = [layer["digest"] for layer in manifest["layers"]]
    assert config["rootfs"] == {"type": "layers", "diff_ids": diffs}
    named = {f"sha256:{path.name}" for path in (image / "blobs" / "sha256").iterdir()}
    assert named == {index["manifests"][0]["digest"], manifest["config"]["digest"], *diffs}
    labels = config["config"]["Labels"]
    assert all(isinstance(value, str) for value in labels.values())
    assert labels == manifest["annotations"]
    return manifest, config, layers


def mount(layers, at):
    """What a container runtime mounts."""
    for layer in layers:
        with tarfile.open(layer, "r:") as tar:
            assert all(member.isreg() and member.name.startswith(ROOT) for member in tar)
            tar.extractall(at, filter="data")
    return at / ROOT


def test_a_mounted_image_is_a_layer(image, entries, tmp_path, trusted):
    _, _, layers = read(image)
    mounted = DirectoryLayer(mount(layers, tmp_path / "mount"), trusted.refuses)
    cache = Cache(tmp_path / "own", Events(), shared=[mounted])
    for entry in entries:
        found = cache.lookup(entry.manifest.kind, entry.key)
        assert (found.digest, found.layer) == (entry.digest, mounted.name)
    nobody = DirectoryLayer(mounted.root, TrustedKeys({}).refuses)
    refused = Cache(None, Events(), shared=[nobody]).lookup("bundle", entries[1].key)
    assert refused.reason == "untrusted"


def test_labels_say_which_device_and_versions(image, entries):
    labels = read(image)[1]["config"]["Labels"]
    mine = "cache.piecegraph.image"
    assert json.loads(labels[f"{mine}/summary"]) == {
        "targets": [{"arch": "90", "backend": "cuda", "warp_size": 32}]
    }
    (bundle,) = json.loads(labels[f"{mine}/bundles"])
    assert bundle["digest"] == entries[1].digest
    assert bundle["versions"] == FACTORS["versions"]
    assert bundle["device"] == FACTORS["device"]
    assert labels[f"{mine}/entry-count"] == "2"
    size = sum(map(len, BLOBS.values())) + len(b"{}")
    assert labels[f"{mine}/cache-size-bytes"] == str(size)
    assert labels["io.kserve.km/cache-mount-subpath"] == ROOT


def test_equal_entries_give_equal_images_and_the_same_layers(
    image, entries, cache, tmp_path, signer
):
    again = tmp_path / "again"
    again.mkdir()
    shutil.copytree(tmp_path / "cache", again / "cache")
    assert write(entries[::-1], again / "image", signer) == write(
        entries, tmp_path / "image.tar", signer
    )
    write(entries, again / "image.tar", signer)
    assert (again / "image.tar").read_bytes() == (tmp_path / "image.tar").read_bytes()
    with tarfile.open(tmp_path / "image.tar") as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    for path in (tmp_path / "unpacked", again / "image"):
        assert files(path) == files(image)
    more = cache.publish("bundle", Key.of("trace", {**FACTORS, "model": "other"}), {}, {})
    write([*entries, more], tmp_path / "more", signer)
    assert set(read(image)[0]["layers"][0].items()) <= set(
        read(tmp_path / "more")[0]["layers"][0].items()
    )


def files(root):
    found = (path for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


def test_nothing_is_replaced_or_left_over(image, entries, tmp_path, root):
    with pytest.raises(OSError, match="it exists"):
        write(entries, image)
    damaged = next(path for path in root.rglob("blobs-v2/*/*") if path.stat().st_size > 2)
    damaged.write_bytes(b"?")
    with pytest.raises(EntryUnusable):
        write(entries, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "image"]


REGISTRY = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {directory}}}}}
http: {{addr: {address}}}
"""


@pytest.fixture
def registry(tmp_path):
    """The address of a container registry of this machine."""
    for tool in ("skopeo", "umoci", "docker-registry"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    settings = tmp_path / "registry.yml"
    settings.write_text(REGISTRY.format(directory=tmp_path / "registry", address=address))
    with subprocess.Popen(["docker-registry", "serve", str(settings)]) as process:
        host, port = address.split(":")
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
                break
            time.sleep(0.1)
        yield address
        process.kill()


@pytest.mark.heavy
def test_skopeo_umoci_and_a_registry_take_the_image(entries, root, tmp_path, registry, capsys):
    tar, copy, bundle = (tmp_path / name for name in ("image.tar", "copy", "bundle"))
    there = ["--cache-dir", str(root)]
    assert main(["cache", "export", str(tar), *there]) == 0
    digest = capsys.readouterr().out.split("image ")[1].split()[0]
    inspected = json.loads(output("skopeo", "inspect", f"oci-archive:{tar}"))
    assert inspected["Digest"] == digest
    assert inspected["Labels"]["cache.piecegraph.image/entry-count"] == "1"
    at = f"docker://{registry}/team/cache:1"
    copied = ["skopeo", "copy", "--insecure-policy", "--preserve-digests"]
    output(*copied, "--dest-tls-verify=false", f"oci-archive:{tar}", at)
    pulled = json.loads(output("skopeo", "inspect", "--tls-verify=false", at))
    assert pulled["Digest"] == digest
    output(*copied, "--src-tls-verify=false", at, f"oci:{copy}:latest")
    imported = ["cache", "import", str(copy), "--trust", "--cache-dir", str(tmp_path / "imported")]
    assert main(imported) == 0
    output("umoci", "unpack", "--rootless", "--image", f"{copy}:latest", str(bundle))
    mounted = DirectoryLayer(bundle / "rootfs" / ROOT)
    found = Cache(tmp_path / "own", Events(), shared=[mounted]).lookup("bundle", entries[1].key)
    assert found.contents == entries[1].contents


def output(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
