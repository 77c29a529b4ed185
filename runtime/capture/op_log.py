"""Whether a function runs the same operators while what it reads is noted.

Noting hands out what stands in for some objects. Code that asks `type(x) is dict` may take another
branch then, and a graph would have a branch that no step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...compile.ir.locations import user_line
from ...torch_compat.basics.ops import call_kernel
from ...torch_compat.basics.tensors import LightDispatchMode, storage_id, tree_map_only
from ..backends.ownership import memory_of, run_seen


class OpLog(LightDispatchMode):
    """The operators that run, also inside custom ones: each with its arguments, and its line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.lines: list[str | None] = []
        self._made: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.calls.append(f"{func}{tree_map_only(Tensor, self._text, (args, given))!r}")
        self.lines.append(user_line())
        result = run_seen(self, func, args, given, call_kernel)
        for tensor in memory_of(result):
            self._made[storage_id(tensor)] = len(self.calls)
        return result

    def _text(self, tensor: Tensor) -> str:
        """Which tensor it is: one by its operator, or by its place."""
        place = storage_id(tensor)
        by = self._made.get(place, place)
        return f"{by}+{tensor.storage_offset()} {tensor.dtype} {tensor.shape} {tensor.stride()}"


def ops_of(run: Callable[[], object]) -> OpLog:
    log = OpLog()
    with log:
        run()
    return log


def first_difference(noted: OpLog, run: Callable[[], object], plain: OpLog) -> str | None:
    """The line of the first operator that differs, None if none does.

    What differs from `run` to `run` by itself, such as memory that each makes, is none.
    """
    if noted.calls == plain.calls:
        return None
    again = ops_of(run)
    if len(again.calls) != len(plain.calls):
        return None
    for at, (one, other) in enumerate(zip(plain.calls, again.calls, strict=True)):
        if one == other and (at >= len(noted.calls) or noted.calls[at] != one):
            return plain.lines[at] or "an op"
    return None if len(noted.calls) == len(plain.calls) else noted.lines[len(plain.calls)]
