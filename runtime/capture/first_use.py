"""What only the first run of a model sets up: it is kept as a whole, or refused as a whole.

A dummy batch restores the buffers that it writes, not the attributes. A model that fills a buffer
and clears a flag when it first runs would find the flag cleared and the buffer as it was. So the
first dummy batch of each kind runs the code twice before anything else: what only the first run
writes is such a set-up. Of attributes alone, such as a table that is made when it is needed, it is
kept. With a tensor that is there before, such as a buffer of a layer, it is undone and refused: its
values would come from padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...compile.held_values import HeldValues
from ...compile.ir.ops import is_custom
from ...errors import SetUpOnFirstUse, StateChanged
from ...torch_compat.basics.ops import op_name
from ...torch_compat.basics.tensors import (
    LightDispatchMode,
    has_plain_memory,
    without_regions,
    writes_counted,
)
from ..core.preserved import SavedMemory

UNDONE = "nothing of it was kept"
STAYS = "that it ran is noted outside of the model and its layers, and could not be undone"
SMALL = 64 << 10
"""Bytes up to which any tensor is compared by its values, and restored. Of a larger one that is not
known to be written the in-place writes are compared that torch has counted."""


def run_twice(
    run: Callable[[], object],
    objects: Mapping[str, Any],
    state: Mapping[str, Tensor],
    held: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    emit: Callable[..., None],
) -> tuple[set[str], set[str]]:
    """Run code that may write attributes of `objects` and tensors of `state`, each by name.

    It may also write tensors of `held`, which have all that the model and its layers hold. Returns
    the names of tensors and attributes that each run writes; the attributes are restored. Emits
    `first_use` for what is kept, and raises SetUpOnFirstUse for what is not.
    """
    before, tensors = HeldValues(objects), _Tensors(state, held, inputs)

    def changes(attributes: HeldValues) -> tuple[set[str], set[str]]:
        return tensors.written(), set(attributes.changed())

    def again() -> tuple[set[str], set[str]]:
        tensors.restore()
        attributes = HeldValues(objects)
        run()
        return changes(attributes)

    def found(names: tuple[set[str], set[str]]) -> bool:
        return any(map(set.intersection, changes(before), names))

    try:
        with without_regions():
            run()
            first = changes(before)
            each_run = again()
            written, set_up = map(set.difference, first, each_run)
            if written or set_up:  # once more, to find the op
                tensors.restore()
                before.restore()
                with _Blame(lambda: found((written, set_up))) as blame:
                    run()
            tensors.restore()
        if written:
            names = ", ".join(map(repr, sorted(written | set_up)))
            left = UNDONE if set_up and written <= tensors.saved else STAYS
            raise SetUpOnFirstUse(op=blame.op or "the model", names=names, left=left)
    except BaseException:
        before.restore()
        raise
    if set_up:
        emit("first_use", level=logging.INFO, op=blame.op, names=sorted(set_up))
    before.restore(each_run[1])
    return each_run


class Places:
    """Where tensors lie and in which form, by name. A tensor of which each run changes that, as by
    `self.state.data = …`, lies elsewhere than a graph reads it."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = {name: each for name, each in tensors.items() if has_plain_memory(each)}
        self._before = {name: each.detach() for name, each in self._tensors.items()}
        self._changed = self._tensors.keys() | set[str]()

    def observe(self, run: Callable[[], object]) -> None:
        before = self._now()
        run()
        now = self._now()
        self._changed &= {name for name in before if before[name] != now[name]}

    def check(self) -> None:
        """Raises StateChanged; the tensors are then as before."""
        for name in self._changed:
            self._tensors[name].data = self._before[name]
        if self._changed:
            raise StateChanged(name=", ".join(sorted(self._changed)))

    def _now(self) -> dict[str, tuple[Any, ...]]:
        named = self._tensors.items()
        return {name: (each.data_ptr(), each.shape, each.stride()) for name, each in named}


class _Tensors:
    """What tensors of a model hold. `saved` are the names of those that can be restored."""

    def __init__(
        self, state: Mapping[str, Tensor], held: Mapping[str, Tensor], inputs: Sequence[Tensor]
    ) -> None:
        known = set(map(id, state.values()))
        other = {id(each): name for name, each in held.items() if _is_plain(each)}
        rest = {name: held[name] for at, name in other.items() if at not in known}
        small = {name: each for name, each in rest.items() if each.nbytes <= SMALL}
        saved = {**state, **small}
        self.saved = saved.keys()
        self._memory = SavedMemory(list(saved.values()), inputs)
        self._counted = [
            (name, each)
            for name, each in rest.items()
            if name not in small and not each.is_inference()
        ]
        self._before = self._counts()

    def _counts(self) -> dict[str, int]:
        return {name: writes_counted(each) for name, each in self._counted}

    def restore(self) -> None:
        """What `written` tells is from now on."""
        self._memory.restore()
        self._before = self._counts()

    def written(self) -> set[str]:
        """Names of those that are not as after `restore`."""
        elements = self._memory.changed(self._memory.now())
        changed = {name for name, each in zip(self.saved, elements, strict=True) if each.any()}
        now = self._counts()
        return changed | {name for name, count in self._before.items() if now[name] != count}


def _is_plain(tensor: Tensor) -> bool:
    """Whether its values can be compared."""
    return has_plain_memory(tensor) and type(tensor.detach()) is Tensor and not tensor.is_meta


class _Blame(LightDispatchMode):
    """Finds the first custom op after which `changed()`."""

    def __init__(self, changed: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.op: str | None = None
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.op is None and is_custom(func) and self._changed():
            self.op = op_name(func)
        return result
