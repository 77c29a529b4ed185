"""The origin of a measurement: time, command, versions and machine."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def origin(program: str = "piecegraph") -> dict[str, Any]:
    """When, by what command, from which code and on what machine something was measured."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": [program, *sys.argv[1:]],
        "versions": {
            **{name: installed_version(name) for name in ("piecegraph", "torch")},
            "commit": _commit(),
        },
        "machine": {
            "cpu": _cpu(),
            "cpus": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "load": list(os.getloadavg()),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "python": platform.python_version(),
            "platform": platform.platform(),
        },
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _commit() -> str | None:
    """The commit of the checkout this package is in; None for an installed wheel."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def installed_version(distribution: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:  # run from a source tree that is not installed
        return None
