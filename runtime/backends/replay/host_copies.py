"""Copies from the host, and reads on it, inside a capture that a CPU does not show.

`torch.arange(n).to(x.device)` makes a tensor on the host and copies it to the device, which no
capture on a device can do. On a CPU both are in one memory, and `.to` does nothing. `tolist()`,
`numpy()` and `torch.tensor([t])` wait for a device; on a CPU they call no operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ....compile.ir.locations import user_line
from ....errors import HostCopyInCapture, HostReadInCapture
from ....torch_compat.basics.ops import is_op
from ....torch_compat.basics.tensors import (
    StorageWeakRef,
    has_default_device,
    reads_values,
    storage_id,
    weak_storage,
)
from ..ownership import memory_of


class HostCopies(TorchFunctionMode):
    """Raises HostCopyInCapture for a tensor on the host that is moved to a device, and
    HostReadInCapture.

    On the host are tensors that are made from none without a device, and those computed from them
    alone. Only calls while `is_open()` count. The body of an operator is not looked at.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        super().__init__()
        self._is_open = is_open
        self._on_host: dict[int, tuple[StorageWeakRef, str, str | None]] = {}
        """By storage: the function that made the tensor, and the user's line."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if not self._is_open() or is_op(func):
            return func(*args, **given)
        if reads_values(func, args, given):
            raise value_read(func)
        if not self._on_host and any(isinstance(each, Tensor) for each in args):
            return func(*args, **given)
        used = memory_of((args, given))
        if used and not self._on_host:
            return func(*args, **given)
        makers = [self._on_host.get(storage_id(tensor)) for tensor in used]
        named = any(isinstance(each, torch.device) for each in (*args, *given.values()))
        if func is Tensor.to and makers[0] and (named or None in makers):
            _, name, where = makers[0]
            raise HostCopyInCapture(where=where, op=name)
        result = func(*args, **given)
        if None in makers or given.get("device") is not None or (not used and has_default_device()):
            return result
        for tensor in memory_of(result):
            maker = makers[0] if makers else None
            name, where = maker[1:] if maker else (func.__name__, user_line())
            self._on_host.setdefault(storage_id(tensor), (weak_storage(tensor), name, where))
        return result


class ValueReads(TorchFunctionMode):
    """Calls `note` before each read of values that no dispatch mode sees."""

    def __init__(self, note: Callable[[HostReadInCapture], object]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if reads_values(func, args, given):
            self._note(value_read(func))
        return func(*args, **given)


def value_read(func: Any) -> HostReadInCapture:
    """The error of `tolist`, `torch.tensor([t])`, `numpy`, and what numpy and pickle call."""
    name = "pickle" if func.__name__ == "__get__" else f"{func.__name__}()"
    return HostReadInCapture(where=user_line(), op=name)
