"""Whether a function runs the same operators while what it reads is noted.

Noting hands out what stands in for some objects. Code that asks `type(x) is dict` may take another
branch then, and a graph would have a branch that no step takes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

from torch import ScriptObject, Tensor

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
    """The operators that run, also inside custom ones: each with its arguments, and its line.

    Memory is named by a number, in the order in which operators are given it. `before` is called
    with each operator: a mode around this one is not given the custom ones.
    """

    def __init__(self, before: Callable[[Any], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before
        self.calls: list[str] = []
        self.lines: list[str | None] = []
        self.kept: dict[int, tuple[int, int]] = {}
        """By number, of memory that no operator was seen to make and that is there after the run,
        such as a weight: the first call that is given it, and its identity. Compiled code makes
        memory without an operator, each run at another place."""
        self._numbers: dict[int, int] = {}
        self._unseen: dict[int, tuple[int, StorageWeakRef]] = {}
        self._held: list[StorageWeakRef] = []
        """So that no other memory has the identity of one that was freed."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Regions that the model compiles run compiled, and are not compiled once more."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        self._before(func)
        stated = tree_map_only((Tensor, ScriptObject), self._text, (args, given))
        self.calls.append(f"{func}{stated!r}")
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

    def _text(self, argument: Tensor | ScriptObject) -> str:
        if isinstance(argument, ScriptObject):  # such as a group: a new one for each call
            return "an object"
        if storage_id(argument) not in self._numbers:
            self._unseen[self._number(argument)] = len(self.calls), weak_storage(argument)
        place = f"#{self._number(argument)}+{argument.storage_offset()}"
        return f"{place} {argument.dtype} {argument.shape} {argument.stride()}"

    def end(self) -> None:
        """The run has ended: see what is kept."""
        for number, (call, storage) in self._unseen.items():
            if not storage.expired():  # type: ignore[no-untyped-call]
                self.kept[number] = call, storage.cdata


def ops_of(run: Callable[[], object], before: Callable[[Any], object]) -> OpLog:
    log = OpLog(before)
    with log:
        run()
    log.end()
    return log


def line_of_difference(
    noted: OpLog,
    plain: OpLog,
    run_again: Callable[[], OpLog],
    on_any_rank: Callable[[bool], bool],
) -> str | None:
    """The line of the first operator that differs, None if none does.

    What differs from run to run by itself, such as memory that each makes, or a collective holds
    for a while, is none. It runs again if `on_any_rank` something differs.
    """
    different = _differences(plain, noted)
    if not on_any_rank(bool(different)):
        return None
    again = run_again()
    if on_any_rank(len(again.calls) != len(plain.calls)):  # `plain` may have set something up
        plain, again = again, run_again()
        different = _differences(plain, noted)
    if len(again.calls) != len(plain.calls):
        return None
    different -= _differences(plain, again)
    if not different:
        return None
    at, lines = min(different), plain.lines + noted.lines[len(plain.lines) :]
    return lines[at] or "an op"


def _differences(one: OpLog, other: OpLog) -> set[int]:
    """The numbers of calls that differ. Memory that one of the two has not kept is not compared."""
    calls = zip_longest(one.calls, other.calls)
    found = {at for at, (call, its) in enumerate(calls) if call != its}
    for number, (at, place) in one.kept.items():
        if other.kept.get(number, (at, place))[1] != place:
            found.add(at)
    return found
