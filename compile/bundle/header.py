"""The compatibility header of a bundle: where and for what model it may be loaded.

It is compared before anything else of a bundle is looked at. A key that was computed right gives
the same answer; the header stands for bundles that were carried by hand, and gives the reason.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .key_factors import device_factors, tensors_digest, versions


def header(model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    """The header of a bundle that is made here for `model` on `device`."""
    return {
        "versions": versions(),
        "platform": f"{sys.platform} {platform.machine()}",
        "device": device_factors(device),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": tensors_digest(model),
    }


def misfit(stated: Mapping[str, Any], model: torch.nn.Module, device: torch.device) -> str | None:
    """Why a bundle with the header `stated` cannot be loaded here; None if it can."""
    for name, here in header(model, device).items():
        if stated.get(name) != here:
            was, now = _differing(stated.get(name), here)
            return f"its {name} is {was}, here it is {now}"
    return None


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """The fields that differ, of two facts that have fields."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return was, now
    names = [name for name in now if was.get(name) != now[name]]
    return {name: was.get(name) for name in names}, {name: now[name] for name in names}
