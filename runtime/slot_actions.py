"""What capturing asks of the owner of the slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .capture_session import CaptureSession
from .recording import Recording


@dataclass(frozen=True, slots=True)
class SlotActions:
    """How the owner of the slots makes a recording, puts it into use, and releases it."""

    record: Callable[[int, CaptureSession], Recording]
    install: Callable[[int, Recording], None]
    remove: Callable[[int], None]
