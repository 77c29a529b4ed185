"""What compiling or loading a model did, as data: filled by this package, read by reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BundleOutcome:
    """Whether the model came from a bundle: its `bytes` and kernels per artifact, or why not."""

    hit: bool
    reason: str | None = None
    detail: str | None = None
    bytes: int | None = None
    kernels: list[int] | None = None
    conditions: int | None = None
    """How many conditions of the bundle were checked."""

    def facts(self) -> dict[str, Any]:
        """What is known of it, JSON-able."""
        shown = {name: getattr(self, name) for name in self.__slots__}
        return {name: value for name, value in shown.items() if value is not None}


@dataclass(frozen=True, slots=True)
class PieceBuilt:
    """A unique piece that was compiled in this process."""

    piece: int
    seconds: float
    kernels: int


@dataclass(slots=True)
class CompileRecords:
    """Of one `prepare`. `lookups` are kept only where events want details."""

    bundle: BundleOutcome | None = None
    pieces: list[PieceBuilt] = field(default_factory=list)
    lookups: list[dict[str, Any]] = field(default_factory=list)
