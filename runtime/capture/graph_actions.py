"""What capturing asks of the owner of the indices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .recording import Recording
from .session import CaptureSession


@dataclass(frozen=True, slots=True)
class GraphActions:
    """How the owner of the indices makes a recording, puts it into use, and releases it."""

    record: Callable[[int, CaptureSession], Recording]
    install: Callable[[int, Recording], None]
    remove: Callable[[int], None]
