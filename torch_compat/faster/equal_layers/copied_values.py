"""Example values for the nodes of a copied region, without running its operators again.

An operator takes thirty times as long on fake tensors as making a tensor whose form is known from
the region. Later passes read the same of both: form, shared memory, version. Weights become inputs
of the graph in the same way, without what Dynamo examines of each.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch._dynamo.utils import _extract_tensor_dict
from torch._dynamo.variables import TensorVariable
from torch._dynamo.variables.builder import GraphArg
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.node import Node
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from ...basics.tensors import fresh_fake_mode, storage_id, writes_of_faking
from .passed_values import may_differ
from .regions import Region

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


def copied_weight(tx: Any, node: Node, source: Any, value: torch.Tensor) -> Any:
    """A variable for a weight that equals the one of `node`, a placeholder, as Dynamo builds it.

    None where Dynamo may build another one: of a weight that it knows, one that shares memory, one
    with a dynamic size or with gradients. The guards are those of `node`.
    """
    output, mode = tx.output, tx.fake_mode
    effects, example = output.side_effects, node.meta["example_value"]
    original = node.meta["grapharg"].example
    converter = mode.fake_tensor_converter
    describer = converter.meta_converter.describer
    if (
        not (isinstance(original, torch.Tensor) and original in effects)
        or (value in effects or source in output.input_source_to_var)
        or not (_is_plain_weight(value) and _stands_for(example, value, mode))
        or value in describer.lookup_tensor
        or value.untyped_storage() in describer.lookup_storage
        or type(variable := effects[original]) is not TensorVariable
        or variable.proxy.node is not node
    ):
        return None
    with no_dispatch():
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        if made.untyped_storage().nbytes() != value.untyped_storage().nbytes():
            return None  # a part of larger memory
        fake = FakeTensor(mode, made, value.device)
    fake.requires_grad = value.requires_grad
    if type(value) is torch.nn.Parameter:
        fake._is_param = True
    converter.set_tensor_memo(value, fake)
    storage = describer.describe_storage(value.untyped_storage())
    converter.meta_converter.set_storage_memo(storage, fake.untyped_storage())
    name = re.sub(r"[^a-zA-Z0-9]+", "_", source.name)
    proxy = output.root_tracer.create_graph_input(name, type(value), fake, source=source)
    proxy.node.meta["tensor_dict"] = _extract_tensor_dict(value)
    proxy.node.meta["grapharg"] = GraphArg(source, value, False, fake)
    variable = variable.clone(proxy=proxy, source=source, mutation_type=None)
    effects.track_object_existing(value, variable)
    output.input_source_to_var[source] = output.variable_tracker_cache[source] = variable
    output.current_tracer.traced_sources.add(source)
    return variable


def _is_plain_weight(value: torch.Tensor) -> bool:
    """Whether a fake tensor for a weight has the form of the weight and nothing else."""
    kept = {each for each in vars(value) if each.startswith("_dynamo")}
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and kept == {"_dynamo_static_input_type"}
        and value._dynamo_static_input_type == "unguarded"  # type: ignore[attr-defined]
        and not hasattr(value, "_is_buffer")
        and value.layout is torch.strided
        and not (value._is_view() or value.is_inference() or value.is_quantized)
        and not (value.is_conj() or value.is_neg())
        and value.dim() > 0
        and value.is_leaf
        and value.grad is None
        and (not value.requires_grad or value.grad_dtype == value.dtype)
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() > 0
    )


def _stands_for(fake: Any, value: torch.Tensor, mode: Any) -> bool:
    """Whether a fake tensor, to which nothing was written, has the form of a weight."""
    return (
        type(fake) is FakeTensor
        and fake.fake_mode is mode
        and fake._version == 0
        and all(type(each) is int for each in (*fake.shape, *fake.stride()))
        and (fake.shape, fake.stride(), fake.storage_offset()) == (value.shape, value.stride(), 0)
        and (fake.dtype, fake.device, fake.requires_grad)
        == (value.dtype, value.device, value.requires_grad)
        and isinstance(fake, torch.nn.Parameter) is isinstance(value, torch.nn.Parameter)
        and fake.constant is None
        and fake.real_tensor is None
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
            return self._copy(value) if type(value) is FakeTensor else tree_map(self._copy, value)

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
