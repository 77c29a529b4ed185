"""The compatibility header of a bundle: where and for what model it may be loaded.

It is compared before anything else of a bundle is looked at. A key that was computed right gives
the same answer; the header stands for bundles that were carried by hand, and gives the reason.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping
from typing import Any

import torch

from ..cache.factors import Json
from .factors import device_factors, tensor_signature, versions
from .plan import Plan


def header(plan: Plan, model: torch.nn.Module, device: torch.device) -> dict[str, Json]:
    """The header of a bundle of `plan`, made here for `model` on `device`."""
    inputs = [item.model_dump(mode="json") for item in plan.inputs]
    return {**_here(model, device), "inputs": inputs}


def misfit(stated: Mapping[str, Any], model: torch.nn.Module, device: torch.device) -> str | None:
    """Why a bundle with the header `stated` cannot be loaded here; None if it can."""
    for name, here in _here(model, device).items():
        if stated.get(name) != here:
            was, now = _differing(stated.get(name), here)
            return f"its {name} is {was}, here it is {now}"
    return None


def _here(model: torch.nn.Module, device: torch.device) -> dict[str, Any]:
    return {
        "versions": versions(),
        "platform": f"{sys.platform} {platform.machine()}",
        "device": device_factors(device),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "weights": _digest(tensor_signature(model)),
    }


def _differing(was: Any, now: Any) -> tuple[Any, Any]:
    """The fields that differ, of two facts that have fields."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return was, now
    names = [name for name in now if was.get(name) != now[name]]
    return {name: was.get(name) for name in names}, {name: now[name] for name in names}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()
