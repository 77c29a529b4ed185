"""Finds where a wrong number is made; see docs/bisect.md.

Names are imported on first use: the command line imports this package before torch is wanted.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .climb import bisect
    from .finding import Finding
    from .script import reproduce
    from .subject import Step, Subject

_HOMES = {
    "Finding": ".finding",
    "Step": ".subject",
    "Subject": ".subject",
    "bisect": ".climb",
    "reproduce": ".script",
}

__all__ = ["Finding", "Step", "Subject", "bisect", "reproduce"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name], __name__), name)
