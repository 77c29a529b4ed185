"""The cache settings of a user, and the cache that they describe."""

from __future__ import annotations

import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pydantic import Field, model_validator

from ..cache import Cache, CacheLayer
from ..cache.directory import DirectoryLayer, read_only_directory
from ..cache.evict import Limits
from ..cache.keys.environment import CACHE_DIR, SIGNING_KEY, SIGNING_KEY_FILE, read
from ..cache.remote import RemoteLayer
from ..cache.signing import Trust, pinned, secret_from_environment, signed_with, trust_all
from ..compile.ir.settings import Settings
from ..errors import CacheNotWritable, InvalidSecret
from ..events import Events

if TYPE_CHECKING:
    from ..cache.layers import Failures


class LayerTrust(StrEnum):
    """Which entries of a layer are loaded. Loading an entry runs its code."""

    SIGNED = "signed"
    PINNED = "pinned"
    ANYBODY = "anybody"


class LayerConfig(Settings):
    """A shared layer: looked up after the private directory; hits are copied into that."""

    at: str
    """A directory, which is only read, or the URL of an fsspec file system such as `s3://…`."""

    trust: LayerTrust = LayerTrust.SIGNED
    """`signed` with the key in PIECEGRAPH_CACHE_SIGNING_KEY(_FILE), `pinned` to `digests`, or by
    `anybody`: for a place that no other user can write to, such as a container image."""

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
    def _from_place(cls, given: Any) -> Any:
        return {"at": str(given)} if not isinstance(given, dict | LayerConfig) else given

    @model_validator(mode="after")
    def _check_consistency(self) -> LayerConfig:
        if (self.trust is LayerTrust.PINNED) != bool(self.digests):
            raise ValueError("digests and trust='pinned' require each other")
        if self.write_back and not self.is_url:
            raise ValueError("a directory is only read; give its URL, file://…, to write to it")
        return self


class CacheSettings(Protocol):
    """The settings of `Config` that describe the cache."""

    @property
    def cache(self) -> bool: ...

    @property
    def cache_dir(self) -> Path | None: ...

    @property
    def cache_layers(self) -> tuple[LayerConfig, ...]: ...

    @property
    def cache_bytes(self) -> int: ...

    @property
    def cache_age_days(self) -> float | None: ...


def open_cache(config: CacheSettings, events: Events) -> Cache:
    """The cache of `config`. A private directory that cannot be written is only read.

    Raises UntrustedDirectory, InvalidSecret for a signed layer without a key, and LayerFailed for
    a layer that cannot be opened.
    """
    root = cache_root(config)
    if root is None:
        return Cache(None, events)
    shared = [_layer(layer) for layer in config.cache_layers]
    age = {} if config.cache_age_days is None else {"age": config.cache_age_days * 86400.0}
    limits = Limits(size=config.cache_bytes, **age)
    try:
        return Cache(root, events, shared=shared, limits=limits)
    except CacheNotWritable as error:
        private = read_only_directory(root)
        name = "cache.unusable" if private is None else "cache.read_only"
        events.emit(name, level=logging.WARNING, reason=str(error))
        return Cache(private, events, shared=shared, limits=limits, off_reason=str(error))


def cache_root(config: CacheSettings) -> Path | None:
    """The private directory: set by the user, by the environment or the default; None if off."""
    if not config.cache:
        return None
    if named := config.cache_dir or read(CACHE_DIR):
        return Path(named)
    import platformdirs

    return Path(platformdirs.user_cache_dir("piecegraph"))


def _layer(layer: LayerConfig) -> CacheLayer:
    secret = secret_from_environment()
    trust = _trust(layer, secret)
    failures: Failures = "raise" if layer.required else "ignore"
    if not layer.is_url:
        return DirectoryLayer(Path(layer.at), trust, failures=failures)
    return RemoteLayer(
        layer.at,
        trust,
        write_back=layer.write_back,
        secret=secret,
        failures=failures,
        request_seconds=layer.request_seconds,
        total_seconds=layer.total_seconds,
    )


def _trust(layer: LayerConfig, secret: bytes | None) -> Trust:
    match layer.trust:
        case LayerTrust.ANYBODY:
            return trust_all
        case LayerTrust.PINNED:
            return pinned(frozenset(layer.digests))
    if secret is None:
        raise InvalidSecret(
            reason=f"layer {layer.at} trusts signed entries, and there is no key",
            variable=SIGNING_KEY,
            file_variable=SIGNING_KEY_FILE,
        )
    return signed_with(secret)
