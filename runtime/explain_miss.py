"""Explains whether a start would hit the cache, and if not, how the nearest bundles differ."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..cache import Entry, Key
from ..cache.inspection import NearEntry, nearest_entries
from ..cache.keys.encoder import Undescribable
from ..compile.bundle.bundle import BadBundle, find_bundle, read_bundle
from ..compile.bundle.key_factors import trace_key
from ..compile.ir.compilation import ExampleArguments
from ..config import Config
from .open_cache import cache_root
from .records import Records
from .request import compile_request
from .switches import resolve_config


@dataclass(frozen=True, slots=True)
class CacheForecast:
    """What a start would find under `key`; None if the model is not cacheable.

    `reason` is None if the bundle would be used, otherwise why not. `nearest` are the bundles in
    the private directory and in layers that are directories, with the key factors that differ.
    """

    key: Key | None
    reason: str | None
    nearest: tuple[NearEntry, ...]

    def __str__(self) -> str:
        name = "no bundle" if self.key is None else f"bundle/{self.key.digest[:12]}"
        lines = [f"{name}: {self.reason or 'hit'}"]
        for near in self.nearest:
            lines.append(f"nearest: bundle/{near.key.digest[:12]}, which differs in")
            lines += [f"  {difference}" for difference in near.differences]
        return "\n".join(lines)


def explain_miss(
    model: torch.nn.Module,
    config: Config,
    *,
    examples: ExampleArguments | None = None,
    at_most: int = 3,
) -> CacheForecast:
    """Why `prepare` with these arguments would hit or miss; nothing is traced or loaded.

    Raises the errors of the configuration and of a cache directory that is not trusted.
    """
    config = resolve_config(config)
    request = compile_request(model, config, Records(), examples)
    try:
        key = trace_key(request.model, request.config, request.device, examples)
    except Undescribable as error:
        return CacheForecast(None, f"not cacheable: {error}", ())
    entry = find_bundle(request.cache, key, request.model, request.events)
    if not isinstance(entry, Entry):
        reason = f"{entry.reason}: {entry.detail}" if entry.detail else entry.reason
        return CacheForecast(key, reason, _nearest(config, key, at_most))
    try:
        read_bundle(entry)
    except BadBundle as error:
        return CacheForecast(key, str(error), ())
    return CacheForecast(key, None, ())


def _nearest(config: Config, key: Key, at_most: int) -> tuple[NearEntry, ...]:
    root = cache_root(config)
    layers = config.cache.layers if config.cache else ()
    places = [Path(layer.at) for layer in layers if not layer.is_url]
    found = {
        near.key: near
        for place in [*([root] if root else []), *places]
        for near in nearest_entries(place, "bundle", key, at_most)
    }
    return tuple(sorted(found.values(), key=lambda near: len(near.differences))[:at_most])
