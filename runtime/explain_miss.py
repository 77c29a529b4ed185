"""Explains whether a start would hit the cache, and if not, how the nearest bundles differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..cache import Entry, Key
from ..cache.inspection import NearEntry, nearest_entries
from ..cache.layers import REMEDIES
from ..compile.bundle.bundle import BadBundle, find_bundle, read_bundle
from ..compile.bundle.key_factors import documented, trace_key
from ..compile.conditions.values import Undescribable
from ..compile.ir.compilation import ExampleArguments
from ..config import Config
from .core.records import Records
from .setup.request import compile_request
from .setup.switches import resolve_config

SHOWN = 10
"""How many differences from one entry the text names."""


@dataclass(frozen=True, slots=True)
class CacheForecast:
    """What a start would find under `key`; None if the model is not cacheable.

    `reason` is None if the bundle would be used, otherwise why not, with what to do about it in
    `remedy`. `nearest` are the bundles of all layers with the key factors that differ.
    """

    key: Key | None
    reason: str | None
    nearest: tuple[NearEntry, ...]
    remedy: str = ""

    def __str__(self) -> str:
        name = "no bundle" if self.key is None else f"bundle/{self.key.digest[:12]}"
        lines = [f"{name}: {self.reason or 'hit'}", *([self.remedy] if self.remedy else [])]
        for near in self.nearest:
            lines.append(
                f"nearest: bundle/{near.key.digest[:12]} in {near.layer}, which differs in"
            )
            lines += [f"  {documented(each)}" for each in near.differences[:SHOWN]]
            if (more := len(near.differences) - SHOWN) > 0:
                lines.append(f"  and {more} more")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """The same as plain data."""
        nearest = [
            {
                "key": near.key.digest,
                "layer": near.layer,
                "differences": [
                    {"name": d.name, "old": d.old, "new": d.new} for d in near.differences
                ],
            }
            for near in self.nearest
        ]
        key = self.key and self.key.digest
        return {"key": key, "reason": self.reason, "remedy": self.remedy, "nearest": nearest}


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
    entry = find_bundle(request.cache, key, request.model, request.events, count=False)
    if not isinstance(entry, Entry):
        near = nearest_entries(request.cache.layers, "bundle", key, at_most)
        return CacheForecast(key, str(entry), tuple(near), REMEDIES.get(entry.reason, ""))
    try:
        read_bundle(entry)
    except BadBundle as error:
        return CacheForecast(key, str(error), ())
    return CacheForecast(key, None, ())
