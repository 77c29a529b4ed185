"""The state that steps change: tensors of layers and buffers, restored before each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.core.preserved import SavedMemory
from ...runtime.tensors_by_path import tensors_by_path
from ...torch_compat.basics.modules import tensor_dict

DEPTH = 4


class State:
    """The current contents of the tensors in `layers` and of the buffers of `model`."""

    def __init__(self, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        self._named = list(_tensors(layers, "layers", DEPTH))
        self._places = [row[1:] for row in self._named] + _buffers(model)
        self._saved = SavedMemory([tensor for _, _, tensor in self._places])

    def restore(self) -> None:
        """The same tensors in the same places, with the same contents."""
        for holder, key, tensor in self._places:
            if _get(holder, key) is not tensor:
                _put(holder, key, tensor)
        self._saved.restore()

    def contents(self) -> SavedMemory:
        """The current contents of the tensors in `layers`."""
        return SavedMemory([_get(holder, key) for _, holder, key, _ in self._named])

    def changed_since(self, before: SavedMemory) -> list[str]:
        """The tensors whose bits differ from `before`, with their first changed row."""
        changed = []
        elements = before.changed(self.contents())
        for (name, *_), differs in zip(self._named, elements, strict=True):
            if differs.any():
                row = int(differs.reshape(len(differs), -1).any(1).nonzero()[0])
                changed.append(f"{name} row {row}")
        return changed


def addresses(model: torch.nn.Module, layers: Mapping[str, Any]) -> dict[str, int]:
    """Where each tensor of the state and each weight is, by name."""
    named = dict(tensors_by_path("layers", layers))
    named.update(model.named_buffers())
    named.update(model.named_parameters())
    return {name: tensor.data_ptr() for name, tensor in named.items()}


def _tensors(value: Any, name: str, depth: int) -> Iterator[tuple[str, Any, Any, Tensor]]:
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


def _buffers(model: torch.nn.Module) -> list[tuple[Any, Any, Tensor]]:
    return [
        (tensor_dict(module, key), key, buffer)
        for module in model.modules()
        for key, buffer in module.named_buffers(recurse=False)
    ]


def _get(holder: Any, key: Any) -> Any:
    return holder[key] if isinstance(holder, Mapping | list | tuple) else getattr(holder, key)


def _put(holder: Any, key: Any, tensor: Tensor) -> None:
    if isinstance(holder, Mapping | list):
        holder[key] = tensor  # type: ignore[index]
    else:
        object.__setattr__(holder, key, tensor)  # a frozen dataclass too
