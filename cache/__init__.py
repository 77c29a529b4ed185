"""Keys, a content-addressed store and bundles: bytes and names, never models."""

from __future__ import annotations

from .cache import Cache
from .entries import Entry, Miss
from .keys.key import Key

__all__ = ["Cache", "Entry", "Key", "Miss"]
