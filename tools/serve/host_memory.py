"""Memory of the host: what is left before the reference engine takes it, and what is too much."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import TooLarge
from ..report.sections import size

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def require_memory(num_bytes: int) -> None:
    """Raise TooLarge if the host cannot give so many bytes."""
    available = available_bytes()
    if num_bytes > available:
        needed = f"about {size(num_bytes)} are needed, {size(available)} are available"
        raise TooLarge(reason=needed)


@contextmanager
def allocating() -> Iterator[None]:
    """Turn what numpy and torch raise for a size they cannot allocate into TooLarge."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise TooLarge(reason=reason) from error


def available_bytes() -> int:
    """Free memory of the machine, or of the control group of this process if that is less."""
    return min([_of_machine(), *_of_group()])


def _of_machine() -> int:
    """Memory available without swapping according to the kernel; all memory on other systems."""
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group() -> Iterator[int]:
    """Limit less use of a container's control group, if it has a limit (version 2, then 1)."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
        except (OSError, ValueError):
            continue
