"""The cache that a configuration describes: private directory, shared layers, limits."""

from __future__ import annotations

import logging
from pathlib import Path

import platformdirs

from ..cache import Cache
from ..cache.evict import Limits
from ..cache.keys.environment import CACHE_DIR, SIGNING_KEY, SIGNING_KEY_FILE, read
from ..cache.layers import Layer, SharedDirectory
from ..cache.remote import Remote
from ..cache.signing import Trust, anybody, pinned, secret_from_environment, signed_with
from ..errors import CacheNotWritable, InvalidSecret
from ..events import Events
from .cache_settings import CacheLayer, LayerTrust
from .config import Config


def open_cache(config: Config, events: Events) -> Cache:
    """The cache of `config`; where its directory cannot be written to, one without a directory.

    Raises UntrustedDirectory, InvalidSecret for a signed layer without a key, and LayerFailed for
    a layer that cannot be opened.
    """
    if not config.cache:
        return Cache(None, events)
    shared = [_layer(layer) for layer in config.cache_layers]
    age = {} if config.cache_age_days is None else {"age": config.cache_age_days * 86400.0}
    limits = Limits(size=config.cache_bytes, **age)
    try:
        return Cache(cache_root(config), events, shared=shared, limits=limits)
    except CacheNotWritable as error:
        events.emit("cache.unusable", level=logging.WARNING, reason=str(error))
        return Cache(None, events, shared=shared)


def cache_root(config: Config) -> Path | None:
    """The private directory: the configuration's, the environment's, or the user's; None if off."""
    if not config.cache:
        return None
    named = config.cache_dir or read(CACHE_DIR)
    return Path(named) if named else Path(platformdirs.user_cache_dir("piecegraph"))


def _layer(layer: CacheLayer) -> Layer:
    secret = secret_from_environment()
    trust, failures = _trust(layer, secret), "raise" if layer.required else "ignore"
    if not layer.is_url:
        return SharedDirectory(Path(layer.at), trust, failures)  # type: ignore[arg-type]
    return Remote(
        layer.at,
        trust,
        write_back=layer.write_back,
        secret=secret,
        failures=failures,  # type: ignore[arg-type]
    )


def _trust(layer: CacheLayer, secret: bytes | None) -> Trust:
    match layer.trust:
        case LayerTrust.ANYBODY:
            return anybody
        case LayerTrust.PINNED:
            return pinned(frozenset(layer.digests))
    if secret is None:
        raise InvalidSecret(
            reason=f"layer {layer.at} is believed by signature, and there is no key",
            variable=SIGNING_KEY,
            file_variable=SIGNING_KEY_FILE,
        )
    return signed_with(secret)
