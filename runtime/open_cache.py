"""The cache that the settings describe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ..cache import Cache, CacheLayer
from ..cache.directory import DirectoryLayer, read_only_directory
from ..cache.evict import Limits
from ..cache.keys.environment import CACHE_DIR, SIGNING_KEY, SIGNING_KEY_FILE, read
from ..cache.remote import RemoteLayer
from ..cache.settings import LayerConfig, LayerTrust
from ..cache.signing import Trust, pinned, secret_from_environment, signed_with, trust_all
from ..config import Config
from ..errors import CacheNotWritable, InvalidSecret
from ..events import Events

if TYPE_CHECKING:
    from ..cache.layers import Failures


def open_cache(config: Config, events: Events) -> Cache:
    """The cache of `config`. A private directory that cannot be written is only read.

    Raises UntrustedDirectory, InvalidSecret for a signed layer without a key, and LayerFailed for
    a layer that cannot be opened.
    """
    root = cache_root(config)
    if root is None:
        return Cache(None, events)
    assert config.cache
    shared = [_layer(layer) for layer in config.cache.layers]
    limits = Limits(size=config.cache.max_bytes)
    try:
        return Cache(root, events, shared=shared, limits=limits)
    except CacheNotWritable as error:
        private = read_only_directory(root)
        name = "cache.unusable" if private is None else "cache.read_only"
        events.emit(name, level=logging.WARNING, reason=str(error))
        return Cache(private, events, shared=shared, limits=limits, off_reason=str(error))


def cache_root(config: Config) -> Path | None:
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
