"""Keys of Inductor's own caches are made without reading the sources of torch and Triton.

Saves: 0.5 of 10 s of CPU time of a cold start with 32 layers (median of 10 alternating pairs of
what `python -m benchmarks prepare --quick` starts).
For: torch 2.11 to 2.15.
Can go: once torch keeps these digests, or makes an artifact that can be stored without a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..basics.patch import replaced


@contextmanager
def short_cache_keys() -> Iterator[None]:
    """Leave the sources of torch and Triton out of the keys of Inductor's caches.

    Its caches are in a directory of this compile, from which nothing is loaded by key.
    """
    from torch._inductor import codecache

    system = staticmethod(lambda: {"hash": "piecegraph"})
    with (
        replaced(codecache, "torch_key", lambda: b"piecegraph"),
        replaced(codecache.CacheBase, "get_system", system),
    ):
        yield
