"""What an uncompiled run of a step may write, which is refused before it happens, and draw."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ....compile.ir.ops import is_custom, tensors_in, written_by
from ....torch_compat.basics.ops import call_kernel, is_mutable, op_name
from ....torch_compat.basics.tensors import LightDispatchMode, storage_id


class Stopped(StrEnum):
    """Why no further step is proved."""

    UNDECLARED = "an op writes to memory that is not known as state"
    OTHER_ROWS = "a step writes rows of large state to which no input points, and none were kept"
    RANDOM = "an op draws random numbers"
    UNSTEADY = "two uncompiled runs from the same state differ"
    FAILED = (
        "the uncompiled model failed on the step's real rows: if its metadata is padded, state by "
        "`prove_with` how it is without"
    )
    REPAIR = "the model that serves instead of wrong code is not the model as it is called"


class NotRepeatable(Exception):
    """A step cannot be run again; `reason` says why."""

    def __init__(self, reason: Stopped, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail


class DeclaredWrites(LightDispatchMode):
    """Raises NotRepeatable before an operator writes to memory that is neither made inside nor
    `known`, and after one that has drawn random numbers. It sees operators inside Python ops."""

    sees_inside = True

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._may_write = set(map(storage_id, known))
        self._devices = {tensor.device for tensor in known if not tensor.is_cpu}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        may_draw = torch.Tag.nondeterministic_seeded in func.tags  # attention may: for its dropout
        before = self._generators(given) if may_draw else []
        for tensor in written_by(func, args, given) if is_mutable(func) else ():
            if tensor.numel() and storage_id(tensor) not in self._may_write:
                raise NotRepeatable(Stopped.UNDECLARED, f"{op_name(func)} {list(tensor.shape)}")
        if is_custom(func):
            with self:
                result = call_kernel(func, args, given)
        else:
            result = func(*args, **given)
        if may_draw and not all(map(torch.equal, before, self._generators(given))):
            raise NotRepeatable(Stopped.RANDOM, op_name(func))
        fresh = {storage_id(each) for each in tensors_in(result)} - self._may_write
        if fresh:
            read = [] if "lift_fresh" in op_name(func) else tensors_in((args, given))
            self._may_write |= fresh - {storage_id(each) for each in read}
        return result

    def _generators(self, kwargs: Any) -> list[Tensor]:
        """The states of the generators from which a call can draw."""
        stated = [kwargs["generator"].get_state()] if kwargs.get("generator") is not None else []
        on_devices = [torch.get_device_module(d).get_rng_state(d) for d in self._devices]
        return [*stated, torch.get_rng_state(), *on_devices]
