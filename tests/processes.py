"""Programs that a test runs in a process of their own."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

PYTHON = sys.executable


def output_of(*command: object, **options: Any) -> str:
    """What a command prints, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout[-3000:]
    return done.stdout
