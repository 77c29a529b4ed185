"""The settings of the cache, as an object of `Config`."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar

from pydantic import Field, model_validator

from ..settings import Settings


class LayerTrust(StrEnum):
    """Which entries of a layer are loaded. Loading an entry runs its code."""

    SIGNED = "signed"
    PINNED = "pinned"
    ANYBODY = "anybody"


class VerifyBundle(StrEnum):
    """When a start from a bundle traces the model again and compares it with the bundle."""

    BACKGROUND = "background"
    BEFORE = "before"
    OFF = "off"


class LayerConfig(Settings):
    """A shared layer: looked up after the private directory; hits are copied into that."""

    _path: ClassVar[str] = "cache.layers"

    at: str
    """A directory, which is only read, or the URL of an fsspec file system such as `s3://…`."""

    trust: LayerTrust = LayerTrust.SIGNED
    """`"signed"` by a key in PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE, `"pinned"` to `digests`, or by
    `"anybody"`: for a place that no other user can write to, such as a container image."""

    digests: tuple[str, ...] = ()
    """`Entry.digest` of each entry of a pinned layer that may be loaded."""

    write_back: bool = False
    """Whether entries that are compiled here are also stored there; URLs only."""

    required: bool = False
    """Whether a failure of the layer is an error; otherwise it is a miss."""

    request_seconds: float = Field(default=60.0, gt=0)
    """Most seconds that a request to a URL may take."""

    total_seconds: float = Field(default=300.0, gt=0)
    """Most seconds that all requests of a start to a URL may take together."""

    @property
    def is_url(self) -> bool:
        return "://" in self.at

    @model_validator(mode="before")
    @classmethod
    def _from_place(cls, layer: Any) -> Any:
        return layer if isinstance(layer, dict | LayerConfig) else {"at": str(layer)}

    @model_validator(mode="after")
    def _check_consistency(self) -> LayerConfig:
        if (self.trust is LayerTrust.PINNED) != bool(self.digests):
            raise ValueError("digests and trust='pinned' require each other")
        if self.write_back and not self.is_url:
            raise ValueError("a directory is only read; give its URL, file://…, to write to it")
        return self


class CacheSettings(Settings):
    """What of the cache is not its directory: shared layers, and the size of the private one."""

    _path: ClassVar[str] = "cache"

    layers: tuple[LayerConfig, ...] = ()
    """Shared `LayerConfig`s, looked up in order after the private directory; see docs/cache.md."""

    verify_bundle: VerifyBundle = VerifyBundle.BACKGROUND
    """When a bundle that is used is compared with a new trace: `"background"` beside serving, at
    every warm start; `"before"` the first step; `"off"`."""

    max_bytes: int = Field(default=10 << 30, ge=0)
    """The most bytes in the private directory; the least recently used entries are removed
    first."""
