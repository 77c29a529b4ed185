"""Files for people: the plan of a compiled model as source and as JSON."""

from __future__ import annotations

from pathlib import Path

from ..ir.plan import Plan
from .codegen import stitched_source


def dump_plan(plan: Plan, directory: Path) -> None:
    """Write `piece_<n>.py`, `stitched.py` and `plan.json` to `directory`, replacing older ones."""
    directory.mkdir(parents=True, exist_ok=True)
    for index, piece in enumerate(plan.pieces):
        (directory / f"piece_{index}.py").write_text(piece.text)
    (directory / "stitched.py").write_text(stitched_source(plan)[0])
    (directory / "plan.json").write_text(plan.model_dump_json(indent=1))
