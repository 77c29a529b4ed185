"""Process groups: their store, and runs of their operators without the other ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ops import COLLECTIVES, OpOverload, call_kernel, is_collective, is_higher_order, is_python_op
from .tensors import LightDispatchMode, tree_leaves, tree_map_only, without_modes


def process_group_store(group: dist.ProcessGroup | None) -> Any:
    """A connection of its own to the store of `group`: a wait on it blocks no other use."""
    of_group: Any = dist.group.WORLD if group is None else group
    return of_group.get_group_store().clone()


def without_other_ranks() -> AbstractContextManager[Any]:
    """Around runs that this rank makes by itself: collectives wait for nobody, see `run_alone`."""
    in_group = dist.is_available() and dist.is_initialized()
    return _Alone() if in_group else nullcontext()  # type: ignore[no-untyped-call]


def run_alone(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Run a collective as if each rank held what this one does, and a sum were the one of one rank.

    Where the result has more rows, or fewer, it has those of this rank in turn.
    """
    if op.namespace == COLLECTIVES:
        first, *others = [part for part in map(_tensors, args) if part]
        for index, tensor in enumerate(first):
            given = others[0][index % len(others[0])] if others else tensor
            if given is not tensor:
                tensor.copy_(_in_turn(given, tensor))
        work = _ENDED.boxed()
        return work if len(op._schema.returns) == 1 else (args[0], work)
    if op._schema.is_mutable:
        return args[0]
    inputs = iter(_tensors(args[0]))
    on_meta = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), args)
    with without_modes():
        form = op(*on_meta, **kwargs)
    return tree_map_only(Tensor, lambda like: _in_turn(next(inputs), like), form)


class _Alone(LightDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if is_collective(func):
            return run_alone(func, args, given)
        if is_higher_order(func) or func.namespace == "aten" or not is_python_op(func):
            return func(*args, **given)
        with self:
            return call_kernel(func, args, given)


class _Ended(dist.Work):
    """Of a collective that has waited for nobody."""

    def wait(self, timeout: Any = None) -> bool:
        return True


_ENDED = _Ended()
"""Torch calls it after Python has let go of it."""


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _in_turn(tensor: Tensor, like: Tensor) -> Tensor:
    elements = tensor.reshape(-1)
    if not elements.numel():
        return tensor.new_zeros(like.shape)
    places = torch.arange(like.numel(), device=tensor.device) % elements.numel()
    return elements[places].view(like.shape)
