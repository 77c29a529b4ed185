"""What a lookup in one layer gives: an entry with verified contents, or the reason for a miss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from .files import Irregular
from .keys.factors import Json
from .keys.key import Key
from .manifest import MAX_MANIFEST_BYTES, BadManifest, Manifest, decode
from .names import blob_name, entry_name

Failures = Literal["ignore", "raise"]
"""Whether an operating-system or network error of a layer is a miss or LayerFailed."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A manifest and the bytes of its blobs by name, each checked against its sha256.

    The contents are in memory, so nothing can fail or change between a hit and its use. `layer`
    names the layer that they come from; `signature` is the one that it had there.
    """

    manifest: Manifest
    contents: Mapping[str, bytes] = field(repr=False)
    layer: str
    signature: str | None = None
    unstored: tuple[str, ...] = field(default=(), compare=False)
    """Of an entry that was published: why a layer, or all, did not store it."""

    @property
    def key(self) -> Key:
        return self.manifest.key

    @property
    def meta(self) -> Mapping[str, Json]:
        return self.manifest.meta

    @property
    def digest(self) -> str:
        """Equal for entries with equal key, meta and contents: what ranks compare."""
        return self.manifest.digest

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(len(content) for content in self.contents.values())


DEPLOY = "Deploy a bundle built from this model with these settings."

REMEDIES = {
    "unreadable": "Make the layer readable for this process: network, credentials, permissions.",
    "incomplete": "Store the bundle in the layer again: a blob is gone, or not visible yet.",
    "damaged": "Store the bundle in the layer again: its bytes have changed.",
    "disabled": "Turn the cache on, with a private cache_dir that can be written.",
    "aside": "Compile it again, with another bundle= than 'force', or deploy another bundle.",
    "untrusted": "Sign the bundle with a key that is trusted here, or pin its digest.",
}
"""What to do about a layer that fails."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Why there is no entry.

    `reason` is one of: "absent"; "unreadable" (an operating-system error); "incomplete" (a blob
    was evicted or is not visible yet); "damaged"; "untrusted"; "refused" (its conditions do
    not hold); "aside" (it was put out of service); "disabled" (there are no layers).
    `damaged` is the relative name of a damaged file, `aside` are digests of blobs not to load.
    """

    reason: str
    detail: str = ""
    layer: str = ""
    damaged: str | None = None
    aside: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return f"{self.reason}: {self.located}" if self.located else self.reason

    @property
    def located(self) -> str:
        """The detail, with the layer if that is what failed."""
        is_of_layer = self.layer and self.reason in REMEDIES
        return f"{self.detail}, in {self.layer}" if is_of_layer else self.detail

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return REMEDIES.get(self.reason, DEPLOY)

    def precedes(self, other: Miss) -> bool:
        """Whether this one says more than `other`: refused first, absent last."""
        order = {"refused": 0, "absent": 2}
        return order.get(self.reason, 1) < order.get(other.reason, 1)


Refusal = Callable[[Manifest], str | None]
"""Why an entry cannot be used, from its manifest; None if it can."""


def accept_any(manifest: Manifest) -> str | None:
    """Refuses nothing."""
    return None


class Source(Protocol):
    """A place that entries are read from. File names are those of names.py."""

    @property
    def name(self) -> str:
        """For events and for `Entry.layer`."""

    def read(self, name: str, limit: int) -> bytes:
        """The bytes at a relative name. Raises FileNotFoundError or another OSError.

        Reads at most about `limit` bytes; the caller checks that they are right.
        """

    def refuses(self, manifest: Manifest, signature: str | None) -> str | None:
        """Why an entry of this place may not be loaded, or None."""


class CacheLayer(Source, Protocol):
    """One place of a cache; a cache asks its layers in order."""

    @property
    def failures(self) -> Failures: ...

    @property
    def writable(self) -> bool: ...

    def entries(self, kind: str) -> Sequence[str]:
        """Relative names of entries of one kind, the newest first; of very many only those.

        For reports; a lookup never lists. Raises OSError.
        """

    def store(self, entry: Entry) -> None:
        """Publish an entry; raises OSError. Only called if `writable`."""


def find(layer: Source, kind: str, key_digest: str, refusal: Refusal = accept_any) -> Entry | Miss:
    """The entry of `kind` under `key_digest` with every blob verified, or why there is none."""
    found = _stored(layer, kind, key_digest)
    if isinstance(found, Miss):
        return found
    manifest, signature = found
    if reason := refusal(manifest):
        return Miss("refused", reason, layer.name)
    contents = {}
    for blob in manifest.blobs:
        content = read_blob(layer, manifest, blob)
        if isinstance(content, Miss):
            return content
        contents[blob] = content
    return Entry(manifest, contents, layer.name, signature)


def held(layer: Source, manifest: Manifest) -> Manifest | Miss:
    """The manifest that a layer has in the place of an entry, or why there is none to use."""
    found = _stored(layer, manifest.kind, manifest.key.digest)
    return found if isinstance(found, Miss) else found[0]


def _stored(layer: Source, kind: str, key_digest: str) -> tuple[Manifest, str | None] | Miss:
    """The manifest to use of an entry, and its signature, or why there is none."""
    name = entry_name(kind, key_digest)
    try:
        manifest, signature = decode(layer.read(name, MAX_MANIFEST_BYTES))
    except FileNotFoundError:
        return Miss("absent", layer=layer.name)
    except OSError as error:
        return _unreadable(layer, name, error)
    except BadManifest as error:
        return Miss("damaged", f"manifest: {error}", layer.name, name)
    if (manifest.kind, manifest.key.digest) != (kind, key_digest):
        return Miss("damaged", "the manifest is of another entry", layer.name, name)
    if distrust := layer.refuses(manifest, signature):
        return Miss("untrusted", distrust, layer.name)
    if aside_reason := manifest.aside_reason:
        return Miss("aside", aside_reason, layer.name, aside=manifest.aside)
    return manifest, signature


def read_blob(layer: Source, manifest: Manifest, name: str) -> bytes | Miss:
    """One verified blob of an entry, or why it cannot be had."""
    ref = manifest.blobs[name]
    file = blob_name(ref.sha256)
    try:
        content = layer.read(file, ref.size)
    except FileNotFoundError:
        return Miss("incomplete", f"blob {name} is missing", layer.name)
    except OSError as error:
        return _unreadable(layer, file, error)
    if not ref.matches(content):
        return Miss("damaged", f"blob {name} has other bytes", layer.name, file)
    return content


def _unreadable(layer: Source, name: str, error: OSError) -> Miss:
    if isinstance(error, Irregular):
        return Miss("damaged", str(error), layer.name, name)
    return Miss("unreadable", str(error), layer.name)
