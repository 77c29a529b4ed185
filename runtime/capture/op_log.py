"""Whether a function runs the same operators while what it reads is noted.

Noting hands out what stands in for some objects. Code that asks `type(x) is dict` may take another
branch then, and a graph would have a branch that no step takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import Tensor

from ...compile.ir.locations import user_line
from ...torch_compat.basics.ops import call_kernel
from ...torch_compat.basics.tensors import (
    LightDispatchMode,
    StorageWeakRef,
    storage_id,
    tree_map_only,
    weak_storage,
)
from ..backends.ownership import memory_of, run_seen


class OpLog(LightDispatchMode):
    """The operators that run, also inside custom ones: each with its arguments, and its line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.lines: list[str | None] = []
        self._numbers: dict[int, int] = {}
        self._unseen: dict[int, StorageWeakRef] = {}
        """By number the memory that no operator was seen to make."""
        self._held: list[StorageWeakRef] = []
        """So that no other memory has the identity of one that was freed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self.calls.append(f"{func}{tree_map_only(Tensor, self._text, (args, given))!r}")
        self.lines.append(user_line())
        result = run_seen(self, func, args, given, call_kernel)
        for tensor in memory_of(result):
            self._number(tensor)
        return result

    def _number(self, tensor: Tensor) -> int:
        place = storage_id(tensor)
        if place not in self._numbers:
            self._numbers[place] = len(self._numbers)
            self._held.append(weak_storage(tensor))
        return self._numbers[place]

    def _text(self, tensor: Tensor) -> str:
        if storage_id(tensor) not in self._numbers:
            self._unseen[self._number(tensor)] = weak_storage(tensor)
        place = f"#{self._number(tensor)}#+{tensor.storage_offset()}"
        return f"{place} {tensor.dtype} {tensor.shape} {tensor.stride()}"

    def end(self) -> None:
        """Name memory by its identity if it is there still, such as a weight, else by its number:
        compiled code makes memory without an operator, each run at another place."""

        def name(found: re.Match[str]) -> str:
            storage = self._unseen.get(int(found[1]))
            if storage is None or storage.expired():  # type: ignore[no-untyped-call]
                return found[0]
            return f"at {storage.cdata}"

        self.calls = [re.sub(r"#(\d+)#", name, call) for call in self.calls]


def ops_of(run: Callable[[], object]) -> OpLog:
    log = OpLog()
    with log:
        run()
    log.end()
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
