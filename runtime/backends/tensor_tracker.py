"""A dispatch mode that sees every operator of a capture and notes which tensors it touches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from ...compile.ir.writes import tensors_in
from ...torch_compat.ops import is_composite, run_kernel
from ...torch_compat.tensors import TorchDispatchMode, storage_id, without_modes
from .ownership import Ownership


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells `ownership` between `start` and `stop`. `device` names the dispatch key: CPU, CUDA."""

    def __init__(self, device: str, ownership: Ownership) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ownership = ownership
        self._device = device

    def start(self) -> None:
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.operation(func, args, kwargs or {})

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        used = tensors_in((args, kwargs))
        self.ownership.find(used)
        result = self.run(func, args, kwargs)
        self.fresh(result, used)
        return result

    def run(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Run `func`; the operators called in the body of a custom op are seen too."""
        if func.namespace == "aten" and not is_composite(func):
            return func(*args, **kwargs)
        with self:
            return run_kernel(func, self._device, args, kwargs)

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a compiled piece, whose inside no mode can see."""
        with without_modes():
            used = tensors_in(args)
            self.ownership.find(used)
            result = fn(*args)
            self.fresh(result, used)
        return result

    def fresh(self, result: Any, used: list[Tensor]) -> list[Tensor]:
        """The tensors of `result` that share no memory with `used`, made by the capture."""
        old = {storage_id(tensor) for tensor in used}
        fresh = [tensor for tensor in tensors_in(result) if storage_id(tensor) not in old]
        for tensor in fresh:
            self.ownership.make(tensor)
        return fresh
