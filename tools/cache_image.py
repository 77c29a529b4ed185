"""Ship entries as an OCI image layout: what registries keep and Kubernetes mounts.

Each entry is a layer of the image (of very many several are): a tar of its manifest and its blobs,
at their names under ROOT. So a mounted image is a layer of a cache, and an entry that did not
change is the same layer in the next image. Equal entries give equal bytes: nothing has a time, an
owner or a compression.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..cache.files import Irregular, place
from ..cache.keys.factors import Json, canonical
from ..cache.layers import Miss, Source, find
from ..cache.lock import owned_directory, remove_unowned
from ..cache.manifest import Manifest, encode
from ..cache.names import SCHEMA, blob_name, entry_name
from ..cache.signing import SigningKey
from ..errors import EntryUnusable

EXPORT = ".piecegraph-export-"

ROOT = "io.piecegraph.cache"
"""The directory of the image that is a layer of a cache."""

MOST_LAYERS = 100
"""Container runtimes mount at most 127."""

OCI = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
LABELLED = ("model", "device", "platform", "versions")
"""Key factors of bundles that are labels; `piecegraph cache show` has all of them."""


def export_image(
    manifests: Iterable[Manifest], source: Source, path: Path, signer: SigningKey | None = None
) -> str:
    """Write entries of `source` as an image; returns its digest.

    They are signed if there is a `signer`; else they keep the signature that they have. `path` is a
    tar if its name ends in `.tar`, else a directory that is not there yet. Raises EntryUnusable for
    an entry that is not whole, and OSError.
    """
    path = Path(os.path.realpath(path))
    if os.path.lexists(path) and not (path.suffix == ".tar" and path.is_file()):
        raise Irregular(errno.EEXIST, "it exists", str(path))
    ordered = sorted(manifests, key=lambda manifest: (manifest.kind, manifest.key.digest))
    remove_unowned(path.parent, EXPORT)
    with owned_directory(path.parent, EXPORT) as scratch:
        layout = scratch / "layout"
        (layout / "blobs" / "sha256").mkdir(parents=True)
        groups = [ordered[n::MOST_LAYERS] for n in range(min(len(ordered), MOST_LAYERS))]
        layers = [_layer(layout, group, source, signer) for group in groups]
        digest = _image(layout, ordered, layers)
        if path.suffix == ".tar":
            with tarfile.open(scratch / "tar", "w", format=tarfile.USTAR_FORMAT) as tar:
                for file in sorted(each for each in layout.rglob("*") if each.is_file()):
                    with file.open("rb") as content:
                        member = _member(str(file.relative_to(layout)), file.stat().st_size)
                        tar.addfile(member, content)
            place(scratch / "tar", path)
        else:
            os.rename(layout, path)
    return digest


def _layer(
    layout: Path, manifests: Sequence[Manifest], source: Source, signer: SigningKey | None
) -> dict[str, Any]:
    """The descriptor of a layer with these entries, whose blobs are not shared with others."""
    temporary = layout / "blobs" / "layer"
    with tarfile.open(temporary, "w", format=tarfile.USTAR_FORMAT) as tar:
        for manifest in manifests:
            entry = find(source, manifest.kind, manifest.key.digest)
            if isinstance(entry, Miss) or entry.digest != manifest.digest:
                name = f"{manifest.kind}/{manifest.key.digest[:12]}"
                reason = str(entry) if isinstance(entry, Miss) else "it has been replaced"
                raise EntryUnusable(entry=name, path=source.name, reason=reason)
            contents = {manifest.blobs[n].sha256: entry.contents[n] for n in manifest.blobs}
            for sha256, content in sorted(contents.items()):
                member = _member(f"{ROOT}/{blob_name(sha256)}", len(content))
                tar.addfile(member, io.BytesIO(content))
            encoded = encode(manifest, signer.sign(manifest) if signer else entry.signature)
            name = f"{ROOT}/{entry_name(manifest.kind, manifest.key.digest)}"
            tar.addfile(_member(name, len(encoded)), io.BytesIO(encoded))
    with temporary.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = temporary.stat().st_size
    os.replace(temporary, layout / "blobs" / "sha256" / digest)
    return {"mediaType": f"{OCI}.layer.v1.tar", "digest": f"sha256:{digest}", "size": size}


def _member(name: str, size: int) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member


def _image(layout: Path, manifests: Sequence[Manifest], layers: Sequence[Any]) -> str:
    """Write what is around the layers; returns the digest of the image's manifest."""
    labels = image_labels(manifests)
    machine = {str(manifest.key.factors.get("platform", "")) for manifest in manifests}
    system, _, processor = (
        machine.pop() if len(machine) == 1 and "" not in machine else _this_machine()
    ).partition(" ")
    target = {"architecture": ARCHITECTURES.get(processor, processor), "os": system}
    config = {
        **target,
        "config": {"Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [layer["digest"] for layer in layers]},
    }
    image = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.manifest.v1+json",
        "config": _written(layout, f"{OCI}.config.v1+json", config),
        "layers": list(layers),
        "annotations": labels,
    }
    described = {**_written(layout, f"{OCI}.manifest.v1+json", image), "platform": target}
    index: Json = {
        "schemaVersion": 2,
        "mediaType": f"{OCI}.index.v1+json",
        "manifests": [described],
    }
    (layout / "index.json").write_bytes(canonical(index))
    (layout / "oci-layout").write_bytes(canonical({"imageLayoutVersion": "1.0.0"}))
    return str(described["digest"])


def _this_machine() -> str:
    return f"{sys.platform} {platform.machine()}"


def _written(layout: Path, media_type: str, content: Any) -> dict[str, Any]:
    """The descriptor of a JSON blob."""
    encoded = canonical(content)
    digest = hashlib.sha256(encoded).hexdigest()
    (layout / "blobs" / "sha256" / digest).write_bytes(encoded)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(encoded)}


def image_labels(manifests: Sequence[Manifest]) -> dict[str, str]:
    """What says for which devices an image is, without pulling it.

    In the form of KServe's KernelCache and its vault (GKM), under our own prefix.
    """
    mine = "cache.piecegraph.image"
    refs = {ref for manifest in manifests for ref in manifest.blobs.values()}
    bundles = [manifest for manifest in manifests if manifest.kind == "bundle"]
    targets: list[dict[str, Any]] = []
    for bundle in bundles:
        target = _target(bundle.key.factors.get("device"))
        targets += [target] if target not in targets else []
    factors = [
        {
            "entry": f"{bundle.kind}/{bundle.key.digest}",
            "digest": bundle.digest,
            **{name: bundle.key.factors.get(name) for name in LABELLED},
        }
        for bundle in bundles
    ]
    content = "".join(manifest.digest for manifest in manifests)
    return {
        "org.opencontainers.image.title": "piecegraph cache",
        f"{mine}/format": f"piecegraph-v{SCHEMA}",
        f"{mine}/entry-count": str(len(manifests)),
        f"{mine}/cache-size-bytes": str(sum(ref.size for ref in refs)),
        f"{mine}/summary": json.dumps({"targets": targets}, sort_keys=True),
        f"{mine}/bundles": json.dumps(factors, sort_keys=True),
        "io.kserve.km/cache-hash": hashlib.sha256(content.encode()).hexdigest()[:10],
        "io.kserve.km/cache-mount-subpath": ROOT,
    }


def _target(device: Any) -> dict[str, Any]:
    """A device factor in the vault's terms."""
    facts: Mapping[str, Any] = device if isinstance(device, dict) else {}
    backend, arch = facts.get("type"), str(facts.get("capability", ""))
    if backend != "cuda":
        return {"backend": backend, "arch": arch}
    return {"backend": backend, "arch": arch.replace(".", ""), "warp_size": 32}
