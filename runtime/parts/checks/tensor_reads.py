"""Notes what Python reads of a tensor that is no tensor: its sizes, its dtype, its class.

A kernel that reads the tensor has them, too, and their tensors are compared. But of a tensor that
no kernel reads, and of its number of rows, a graph has what Python made of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .observer import Observer

_FACTS = (bool, int, str, tuple, torch.dtype, torch.device, torch.layout)
_OF_MEMORY = ("data_ptr", "storage_offset")
"""Of what is compared as memory."""


class TensorReads(TorchFunctionMode):
    """Tells `observer` of each read of a tensor that returns no tensor."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, _FACTS) and args and isinstance(args[0], Tensor) and not kwargs:
            name, is_attribute = getattr(func, "__name__", ""), False
            if name == "__get__":
                name, is_attribute = func.__self__.__name__, True
            is_read = name == "__len__" or (not name.startswith("_") and hasattr(Tensor, name))
            if is_read and name not in _OF_MEMORY:
                expression = name if is_attribute else name + "({})"
                self._observer.tensor_fact(args[0], expression, args[1:], result)
        return result
