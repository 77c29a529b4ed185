"""Example values for the nodes of a copied region, without running its operators again.

An operator takes thirty times as long on fake tensors as making a tensor whose form is known from
the region. Later passes read the same of both: form, shared memory, version.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.node import Node
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from .passed_values import may_differ
from .regions import Region
from .tensors import fresh_fake_mode, storage_id, writes_of_faking

_MEMOS = ("_nonzero_memo", "_item_memo", "_unique_memo", "_unique_consecutive_memo")
_IMMUTABLE = (
    *(bool, int, float, str, type(None), torch.dtype, torch.device),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


class RegionValues:
    """What is known of the example values of a region when its trace ends."""

    def __init__(self, region: Region, mode: Any) -> None:
        self.mode = mode
        self.versions = {
            id(each): each._version for node in region.nodes for each in _tensors(node)
        }
        may_write = any(map(_may_be_written, (*region.given, *region.outside)))
        self.nodes = {
            node
            for node in region.nodes
            if not may_write and not may_differ(node) and self._is_known(node)
        }

    def _is_known(self, node: Node) -> bool:
        return "example_value" in node.meta and all(
            isinstance(value, _IMMUTABLE) or self._can_be_copied(value)
            for value in tree_leaves(node.meta["example_value"])
        )

    def _can_be_copied(self, value: Any) -> bool:
        return (
            type(value) is FakeTensor
            and value.fake_mode is self.mode
            and value.layout is torch.strided
            and not (value.requires_grad or value.is_inference())
            and not (value.is_conj() or value.is_neg())
            and value.constant is None
            and value.real_tensor is None
            and all(getattr(value, each, None) is None for each in _MEMOS)
        )


class CopiedValues:
    """Example values of one copy: tensors share memory exactly where those of the region do."""

    def __init__(self, known: RegionValues) -> None:
        self._known = known
        self._tensors: dict[int, torch.Tensor] = {}
        self._memory: dict[int, torch.Tensor] = {}
        """By storage of the region: a tensor in that of the copy."""
        self._alike = True
        """Whether tensors that were not copied share memory wherever those of the region do."""

    def pair(self, one: Any, other: Any) -> None:
        """`other`, which was not copied, stands for `one`."""
        for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
            if isinstance(a, torch.Tensor):
                memory = self._memory.setdefault(storage_id(a), b)
                same = self._tensors.setdefault(id(a), b) is b
                self._alike = self._alike and same and storage_id(memory) == storage_id(b)

    def are_known(self, node: Node) -> bool:
        """Whether `copy` makes the results of a node's operator, and it does nothing else."""
        return self._alike and node in self._known.nodes

    def copy(self, value: Any) -> Any:
        """The value that stands for a value of the region."""
        mode = self._known.mode
        with no_dispatch(), in_kernel_invocation_manager(mode):
            return tree_map(self._copy, value)

    def end(self) -> None:
        """Give all tensors the versions that those of the region had."""
        for key, version in self._known.versions.items():
            tensor = self._tensors.get(key)
            if tensor is not None and tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (made := self._tensors.get(id(value))) is not None:
            return made
        memory = self._memory.get(storage_id(value))
        if memory is None:
            # the only operator that makes a storage without computing its symbolic size
            made = torch._lazy_clone(value)
        elif memory.dtype is value.dtype:
            made = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            made = torch.empty(0, dtype=value.dtype, device="meta")
            place = value.storage_offset(), value.shape, value.stride()
            made.set_(memory.untyped_storage(), *place)
        mode, device = self._known.mode, value.fake_device  # type: ignore[attr-defined]
        made = FakeTensor(mode, made, device, requires_grad=False)
        self._tensors[id(value)] = self._memory[storage_id(value)] = made
        return made


def _may_be_written(node: Node) -> bool:
    """Whether anything was written to the memory of a value since it was made."""
    counted = sum(each._version for each in _tensors(node))  # of one tensor, or a size
    if counted == 0 or node.op != "placeholder":
        return counted != 0
    return counted != writes_of_faking(node.meta["grapharg"].example, fresh_fake_mode())


def _tensors(node: Node) -> list[torch.Tensor]:
    values = tree_leaves(node.meta.get("example_value"))
    return [each for each in values if isinstance(each, torch.Tensor)]
