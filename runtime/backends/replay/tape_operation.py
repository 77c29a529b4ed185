"""One operation of a tape: a call on recorded memory, its results put back where they were."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ....compile.ir.writes import tensors_in
from ....torch_compat.tensors import storage_id

Operation = Callable[[], None]


def tape_operation(call: Callable[[], Any], result: Any, fresh: list[Tensor]) -> Operation:
    """`call`, whose `result` was recorded; tensors not in `fresh` have a place of their own.

    The common forms, one tensor and a flat tuple, all fresh, are spared the walk of a tree.
    """
    if not fresh:
        return call
    owned = {storage_id(tensor) for tensor in fresh}
    places = [t.detach() if storage_id(t) in owned else None for t in tensors_in(result)]
    copied = [place for place in places if place is not None]
    if isinstance(result, Tensor):
        return partial(_copy_one, call, copied[0])
    if len(copied) == len(result) and all(isinstance(item, Tensor) for item in result):
        return partial(_copy_flat, call, copied)
    return partial(_copy_tree, call, places)


def _copy_one(call: Callable[[], Tensor], place: Tensor) -> None:
    place.copy_(call())


def _copy_flat(call: Callable[[], tuple[Tensor, ...]], places: list[Tensor]) -> None:
    for place, value in zip(places, call(), strict=True):
        place.copy_(value)


def _copy_tree(call: Callable[[], Any], places: list[Tensor | None]) -> None:
    for place, value in zip(places, tensors_in(call()), strict=True):
        if place is not None:
            place.copy_(value)
