"""Counts of all starts that used a private directory: hits, misses by reason, bytes, seconds saved.

Each process appends lines, JSON objects of counts, so that no lock is needed. Their sum replaces
them when the file is large; what another process adds in that moment may be lost.
"""

from __future__ import annotations

import contextlib
import json
import operator
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from .files import read_file
from .keys.factors import canonical
from .lock import owned_directory
from .names import SCRATCH_AREA

NAME = "statistics"
MAX_BYTES = 1 << 18


def add_counts(root: Path, counts: Mapping[str, int]) -> None:
    """Add `counts` to those of a private directory, where it can be written."""
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(root / NAME, flags, 0o600)
        try:
            os.write(descriptor, canonical(dict(counts)) + b"\n")
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > MAX_BYTES:
            with owned_directory(root / SCRATCH_AREA) as scratch:
                os.replace(root / NAME, scratch / NAME)
                add_counts(root, read_counts(scratch))


def read_counts(root: Path) -> Counter[str]:
    """The counts of all starts; a line that is not whole, or has other values, is skipped."""
    counts: Counter[str] = Counter()
    with contextlib.suppress(OSError):
        for line in read_file(root / NAME, 2 * MAX_BYTES).splitlines():
            with contextlib.suppress(ValueError, TypeError, AttributeError, RecursionError):
                counts.update({name: operator.index(n) for name, n in json.loads(line).items()})
    return counts
