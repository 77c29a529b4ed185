"""The cache that the settings describe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ...cache import Cache, CacheLayer
from ...cache.directory import (
    DirectoryLayer,
    private_directory,
    private_root,
    read_only_directory,
)
from ...cache.evict import Limits
from ...cache.keys.environment import CACHE_DIR, TRUSTED_KEYS_FILE
from ...cache.remote import RemoteLayer, RemoteSeconds
from ...cache.settings import LayerConfig, LayerTrust
from ...cache.signing import (
    SigningKey,
    Trust,
    TrustedKeys,
    pinned,
    signing_key,
    trust_all,
    trusted_keys,
)
from ...config import Config
from ...errors import CacheNotWritable, KeysMissing
from ...events import Events

if TYPE_CHECKING:
    from ...cache.layers import Failures


def open_cache(config: Config, events: Events) -> Cache:
    """The cache of `config`. A private directory that cannot be written is only read.

    Raises UntrustedDirectory, InvalidKeyFile, KeysMissing for a signed layer without a key, and
    LayerFailed for a layer that cannot be opened.
    """
    if not config.cache:
        return Cache(None, events)
    root = cache_root(config)
    if root is None:
        reason = f"this user has no home directory: set {CACHE_DIR} or cache_dir"
        events.emit("cache.unusable", level=logging.WARNING, reason=reason)
        return Cache(None, events, off_reason=reason)
    signer = signing_key()
    keys = trusted_keys(signer)
    revoked = keys.revokes if keys else trust_all
    shared = [_layer(layer, signer, keys) for layer in config.cache.layers]
    limits = Limits(size=config.cache.max_bytes)
    private: DirectoryLayer | None
    reason = ""
    try:
        private = private_directory(root, trust=revoked)
    except CacheNotWritable as error:
        private = read_only_directory(root, revoked)
        name = "cache.unusable" if private is None else "cache.read_only"
        events.emit(name, level=logging.WARNING, reason=str(error))
        reason = f"{root}: {error.facts['reason']}"
    sign = signer.sign if signer else None
    return Cache(private, events, shared=shared, limits=limits, off_reason=reason, sign=sign)


def cache_root(config: Config) -> Path | None:
    """The private directory: set by the user, by the environment or the default.

    None if the cache is off, and for a default or a `~` where the user has no home directory.
    """
    return private_root(config.cache_dir) if config.cache else None


def _layer(layer: LayerConfig, signer: SigningKey | None, keys: TrustedKeys | None) -> CacheLayer:
    trust = _trust(layer, keys)
    failures: Failures = "raise" if layer.required else "ignore"
    if not layer.is_url:
        return DirectoryLayer(Path(layer.at), trust, failures=failures)
    return RemoteLayer(
        layer.at,
        trust,
        write_back=layer.write_back,
        signer=signer,
        failures=failures,
        seconds=RemoteSeconds(request=layer.request_seconds, total=layer.total_seconds),
    )


def _trust(layer: LayerConfig, keys: TrustedKeys | None) -> Trust:
    match layer.trust:
        case LayerTrust.ANYBODY:
            return trust_all
        case LayerTrust.PINNED:
            return pinned(frozenset(layer.digests))
    if keys is None:
        raise KeysMissing(layer=layer.at, variable=TRUSTED_KEYS_FILE)
    return keys.refuses
