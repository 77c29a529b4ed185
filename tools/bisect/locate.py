"""From a wrong step to the piece, the splitting call or the guard behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .compare import first_wrong
from .observe import Ran

if TYPE_CHECKING:
    from ...compile.ir.plan import Plan


@dataclass(frozen=True, slots=True)
class GuiltyCall:
    """The first splitting call with a wrong tensor; `itself` if what it was given is right."""

    index: int
    itself: bool


def guilty_call(right: Ran, ran: Ran, tolerance: float | None) -> GuiltyCall | None:
    """None if all calls agree, or if they cannot be seen."""
    for index, (want, have) in enumerate(zip(right.calls, ran.calls, strict=False)):
        if first_wrong(want.before, have.before, tolerance):
            return GuiltyCall(index, itself=False)
        if first_wrong(want.after, have.after, tolerance):
            return GuiltyCall(index, itself=True)
    return None


def guilty_piece(plan: Plan, call: GuiltyCall | None) -> int | None:
    """The use of a piece that ran last before a wrong call; without one, the last of all."""
    uses = calls = 0
    for step in plan.steps:
        if step.kind == "piece":
            uses += 1
        else:
            if call is not None and calls == call.index:
                break
            calls += 1
    return uses - 1 if uses else None


def guilty_guard(plan: Plan, size: int) -> tuple[str | None, str]:
    """Where the guard stands that does not hold, and what it says; (None, "") if all are proved."""
    unproved = [guard for guard in plan.guards if not guard.proved]
    broken = [guard for guard in unproved if size in _sizes(guard.failing)]
    if not unproved:
        return None, ""
    guard = (broken or unproved)[0]
    failing = ", ".join(str(one) for one in guard.failing) or guard.method
    return _file(guard.where), f"guard {guard.expression} was not proved: it fails for {failing}"


def _file(where: str | None) -> str | None:
    """`file.py:8` without the directories, which may have been cut in the middle."""
    return where and where.rpartition("/")[2]


def _sizes(failing: tuple[dict[str, int], ...]) -> set[Any]:
    return {size for sizes in failing for size in sizes.values()}
