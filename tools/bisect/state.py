"""The state that steps change: tensors of layers and buffers, restored before each stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ...runtime.tensors_by_path import tensors_by_path
from ...torch_compat.basics.modules import tensor_dict

DEPTH = 4


class State:
    """The current contents of the tensors in `layers` and of the buffers of `model`."""

    def __init__(self, model: torch.nn.Module, layers: Mapping[str, Any]) -> None:
        places = [row[1:] for row in _tensors(layers, "layers", DEPTH)] + _buffers(model)
        self._saved = [(holder, key, tensor, tensor.clone()) for holder, key, tensor in places]
        self._named = [each[:3] for each in _tensors(layers, "layers", DEPTH)]

    def restore(self) -> None:
        """The same tensors in the same places, with the same contents."""
        with torch.no_grad():
            for holder, key, tensor, content in self._saved:
                if _get(holder, key) is not tensor:
                    _put(holder, key, tensor)
                tensor.copy_(content)

    def contents(self) -> dict[str, Tensor]:
        """Copies of the current contents of the tensors, by name."""
        return {name: _get(holder, key).clone() for name, holder, key in self._named}

    def changed_since(self, before: Mapping[str, Tensor]) -> list[str]:
        """The tensors that differ from `before`, with their first changed row."""
        changed = []
        for name, content in self.contents().items():
            differs = (content != before[name]) & ~(content.isnan() & before[name].isnan())
            if differs.any():
                changed.append(
                    f"{name} row {int(differs.reshape(len(differs), -1).any(1).nonzero()[0])}"
                )
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
