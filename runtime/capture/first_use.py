"""What only the first run of a model sets up: it is kept as a whole, or refused as a whole.

A dummy batch restores the buffers that it writes, not the attributes. A model that fills a buffer
and clears a flag when it first runs would find the flag cleared and the buffer as it was. So the
first dummy batch of each kind runs the code twice before anything else: what only the first run
writes is such a set-up. Of attributes alone, such as a table that is made when it is needed, it is
kept. With a buffer it is undone and refused: its values would come from padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from ...compile.held_values import HeldValues
from ...compile.ir.ops import is_custom
from ...errors import SetUpOnFirstUse
from ...torch_compat.basics.ops import op_name
from ...torch_compat.basics.tensors import LightDispatchMode, without_regions
from ..core.preserved import SavedMemory

UNDONE = "nothing of it was kept"
STAYS = "that it ran is noted outside of the model and its layers, and could not be undone"


def run_twice(
    run: Callable[[], object],
    objects: Mapping[str, Any],
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    emit: Callable[..., None],
) -> None:
    """Run code that may write attributes of `objects` and tensors of `state`, each by name.

    Emits `first_use` for what is kept, and raises SetUpOnFirstUse for what is not.
    """
    before, memory = HeldValues(objects), SavedMemory(list(state.values()), inputs)

    def changes(held: HeldValues) -> tuple[set[str], set[str]]:
        elements = memory.changed(memory.now())
        tensors = zip(state, elements, strict=True)
        return {name for name, each in tensors if each.any()}, set(held.changed())

    def again() -> tuple[set[str], set[str]]:
        memory.restore()
        held = HeldValues(objects)
        run()
        return changes(held)

    def found(names: tuple[set[str], set[str]]) -> bool:
        return any(map(set.intersection, changes(before), names))

    try:
        with without_regions():
            run()
            first = changes(before)
            written, set_up = map(set.difference, first, again())
            if written or set_up:  # once more, to find the op
                memory.restore()
                before.restore()
                with _Blame(lambda: found((written, set_up))) as blame:
                    run()
            memory.restore()
        if written:
            names = ", ".join(map(repr, sorted(written | set_up)))
            left = UNDONE if set_up else STAYS
            raise SetUpOnFirstUse(op=blame.op or "the model", names=names, left=left)
    except BaseException:
        before.restore()
        raise
    if set_up:
        emit("first_use", level=logging.INFO, op=blame.op, names=sorted(set_up))


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
