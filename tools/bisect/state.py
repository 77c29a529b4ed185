"""The state that steps change: tensors of layers and buffers, restored before each stage."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...runtime.core.preserved import SavedMemory
from ...runtime.tensors_by_path import tensors_by_path
from ...torch_compat.basics.modules import tensor_dict

DEPTH = 4

_Place = tuple[str, Any, Any, Tensor]
"""Name, holder and key of a tensor, and the tensor that was there at first."""


class Moment:
    """Which tensors were at some places at one time, and their contents."""

    def __init__(self, places: Sequence[_Place]) -> None:
        self.names = [name for name, *_ in places]
        self._places = places
        self.tensors = [_now(place) for place in places]
        self._saved = SavedMemory(self.tensors)

    @property
    def kept(self) -> list[Tensor]:
        """The contents of the tensors then."""
        return [content for _, _, content in self._saved.contents()]

    def restore(self) -> None:
        """The same tensors in the same places, with the same contents."""
        for place, tensor in zip(self._places, self.tensors, strict=True):
            if _now(place) is not tensor:
                _put(*place[1:3], tensor)
        self._saved.restore()

    def later(self) -> Moment:
        """The same tensors with their contents now."""
        current = copy.copy(self)
        current._saved = self._saved.now()
        return current

    def written(self, later: Moment) -> list[Tensor]:
        """The elements of each tensor whose bits differ later."""
        return self._saved.changed(later._saved)

    def rows_of(self, elements: Sequence[Tensor]) -> list[Tensor]:
        """The rows of each tensor that have some of its `elements`; all others of them are 0."""
        return self._saved.rows_of(elements)

    def changed(self, later: Moment) -> list[tuple[str, int]]:
        """Name and first row of each tensor whose bits differ later."""
        named = zip(self.names, self.written(later), strict=True)
        return [(name, row_numbers(elements)[0]) for name, elements in named if elements.any()]


class ModelState:
    """The tensors in `layers`, and the buffers of `model`, which pieces may write."""

    def __init__(self, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        self._buffers = _buffers(model)
        self._places = [*_tensors(layers, "layers", DEPTH), *self._buffers]
        self._start = self.now()

    def restore(self) -> None:
        """As it was at first."""
        self._start.restore()

    def now(self) -> Moment:
        """All of it now."""
        return Moment(self._places)

    def buffers(self) -> Moment:
        """The model's buffers now."""
        return Moment(self._buffers)


def row_numbers(elements: Tensor) -> list[int]:
    """The rows of the largest dimension that have some of `elements`, as `rows_of` has them."""
    if not elements.dim():
        return [0]
    dim = max(range(elements.dim()), key=elements.shape.__getitem__)
    rows = elements.movedim(dim, 0).flatten(1) if elements.dim() > 1 else elements[:, None]
    numbers: list[int] = rows.any(1).nonzero().flatten().tolist()
    return numbers


def addresses(layers: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Where the memory and the first element of each tensor of the layers are, by name."""
    return {
        name: (tensor.untyped_storage().data_ptr(), tensor.data_ptr())
        for name, tensor in tensors_by_path("layers", layers)
    }


def _tensors(value: Any, name: str, depth: int) -> Iterator[_Place]:
    if not depth:
        return
    for key, item in _items(value):
        label = f"{name}[{key!r}]" if isinstance(value, Mapping | list) else f"{name}.{key}"
        if isinstance(item, Tensor):
            yield label, value, key, item
        else:
            yield from _tensors(item, label, depth - 1)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return list(getattr(value, "__dict__", {}).items())


def _buffers(model: torch.nn.Module) -> list[_Place]:
    return [
        (f"{path}.{key}".lstrip("."), tensor_dict(module, key), key, buffer)
        for path, module in model.named_modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]


def _now(place: _Place) -> Tensor:
    _, holder, key, at_first = place
    plain = isinstance(holder, Mapping | list | tuple)
    tensor = holder[key] if plain else getattr(holder, key)
    return tensor if isinstance(tensor, Tensor) else at_first


def _put(holder: Any, key: Any, tensor: Tensor) -> None:
    if isinstance(holder, Mapping | list):
        holder[key] = tensor  # type: ignore[index]
    else:
        object.__setattr__(holder, key, tensor)  # a frozen dataclass too
