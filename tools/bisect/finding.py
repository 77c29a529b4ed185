"""What bisect found, as one line."""

from __future__ import annotations

from dataclasses import dataclass

from .compare import Wrong


@dataclass(frozen=True, slots=True)
class Finding:
    """The lowest rung that is wrong, and as much as is known of the place.

    `size` is in real tokens, `padded` what they ran as. `wrong` is None where a step raised, and
    then `note` says what.
    """

    stage: str
    step: int
    size: int
    padded: int
    piece: int | None
    operator: str | None
    wrong: Wrong | None
    note: str = ""

    def line(self) -> str:
        """All of it on one line."""
        padding = f" (padded to {self.padded})" if self.padded != self.size else ""
        parts = [
            f"stage={self.stage}",
            f"piece={'-' if self.piece is None else self.piece}",
            f"operator={self.operator or '-'}",
            f"step={self.step}",
            f"size={self.size}{padding}",
            f"first wrong: {self.wrong}" if self.wrong else "no result",
        ]
        return " ".join(parts) + (f"; {self.note}" if self.note else "")
