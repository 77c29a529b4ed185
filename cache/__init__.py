"""The compile cache: keys and a content-addressed store of bytes; knows nothing of models."""

from __future__ import annotations

from .cache import Cache
from .keys.key import Key
from .layers import CacheLayer, Entry, Miss

__all__ = ["Cache", "CacheLayer", "Entry", "Key", "Miss"]
