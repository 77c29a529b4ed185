"""The source text that torch keeps of each generated graph, without end.

It is only read for tracebacks. Another thread may generate graphs meanwhile: theirs are in the same
range, and their tracebacks lack text once it was dropped.
"""

from __future__ import annotations

import linecache

from torch.fx.graph_module import _loader


def next_source() -> int:
    """The number of the next source text."""
    return int(_loader.next_id)


def drop_sources(numbers: range) -> None:
    """Forget the source texts with these numbers."""
    for number in numbers:
        key = f"<eval_with_key>.{number}"
        _loader.eval_cache.pop(key, None)
        linecache.cache.pop(key, None)
