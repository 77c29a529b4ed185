"""Layers that read values of tensors on the host, such as loops over the experts that are used.

They cannot be traced. As mixers they run between graphs, as they are. Functions of torch that a
layer calls may do it too, such as a distribution that checks its arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ....torch_compat.basics.frames import is_torch_file
from .attention import UnknownAttention

READS = {
    torch.nonzero,
    Tensor.nonzero,
    Tensor.item,
    Tensor.tolist,
    Tensor.__int__,
    Tensor.__index__,
    Tensor.__bool__,
}


@contextmanager
def host_readers(model: nn.Module) -> Iterator[list[str]]:
    """Collects the names of modules of `model` whose own code reads values of tensors."""
    names = {module: name for name, module in model.named_modules() if name}
    readers: list[str] = []
    with _Reads(names, readers):
        yield readers


def check_readers(readers: Iterable[str], mixers: Iterable[str]) -> None:
    """Raise UnknownAttention for one of `readers` that is not inside one of `mixers`."""
    inside = tuple(f"{name}." for name in mixers)
    for name in readers:
        if not f"{name}.".startswith(inside):
            raise UnknownAttention(f"{name} reads values of tensors on the host", name)


class _Reads(TorchFunctionMode):
    """Looks at who calls functions that read values."""

    def __init__(self, names: Mapping[nn.Module, str], readers: list[str]) -> None:
        self.names, self.readers = names, readers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS:
            caller: FrameType | None = sys._getframe(1)
            while caller is not None and is_torch_file(caller.f_code.co_filename):
                caller = caller.f_back
            owner = caller and caller.f_locals.get("self")
            name = self.names.get(owner) if isinstance(owner, nn.Module) else None
            if name is not None and name not in self.readers:
                self.readers.append(name)
        return func(*args, **(kwargs or {}))
