"""Add a copy of a region to the graph.

An operator takes thirty times as long on fake tensors as making a tensor whose form is known from
the region. Later passes read the same of both: form, shared memory, version. Only operators that
are given a name run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.utils import get_fake_value, set_example_value
from torch._dynamo.variables import ConstantVariable, TensorVariable, TupleVariable
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx.node import Node, map_aggregate
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map

from ...basics.tensors import storage_id
from .match import Match
from .names import Name, is_named
from .region import Region, metadata

_MEMOS = ("_nonzero_memo", "_item_memo", "_unique_memo", "_unique_consecutive_memo")
_IMMUTABLE = (
    *(bool, int, float, str, type(None), torch.dtype, torch.device),
    *(torch.SymInt, torch.SymFloat, torch.SymBool),
)


class RegionValues:
    """What a copy has to know of the example values of a region, when its trace ends."""

    def __init__(self, region: Region, mode: Any) -> None:
        self.mode = mode
        self.versions = {
            id(tensor): tensor._version for node in region.nodes for tensor in _tensors(node)
        }
        written = any(
            tensor._version for node in (*region.args, *region.inputs) for tensor in _tensors(node)
        )
        self.nodes = {
            node
            for node in region.nodes
            if not (written or is_named(node)) and self._is_known(node)
        }
        """Nodes whose example values can be copied."""

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
            and all(getattr(value, name, None) is None for name in _MEMOS)
        )


class CopiedValues:
    """Example values of one copy: tensors share memory exactly where those of the region do."""

    def __init__(self, values: RegionValues) -> None:
        self._values = values
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
        return self._alike and node in self._values.nodes

    def copy(self, value: Any) -> Any:
        """The value that stands for a value of the region."""
        with no_dispatch(), in_kernel_invocation_manager(self._values.mode):
            return self._copy(value) if type(value) is FakeTensor else tree_map(self._copy, value)

    def end(self) -> None:
        """Give all tensors the versions that those of the region had."""
        for key, version in self._values.versions.items():
            tensor = self._tensors.get(key)
            if tensor is not None and tensor._version != version:
                torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))

    def _copy(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if (copied := self._tensors.get(id(value))) is not None:
            return copied
        memory = self._memory.get(storage_id(value))
        if memory is None:
            # the only operator that makes a storage without computing its symbolic size
            meta = torch._lazy_clone(value)
        elif memory.dtype is value.dtype:
            meta = memory.as_strided(value.shape, value.stride(), value.storage_offset())
        else:
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            place = value.storage_offset(), value.shape, value.stride()
            meta.set_(memory.untyped_storage(), *place)
        device = value.fake_device  # type: ignore[attr-defined]
        copied = FakeTensor(self._values.mode, meta, device, requires_grad=False)
        self._tensors[id(value)] = self._memory[storage_id(value)] = copied
        return copied


def _tensors(node: Node) -> list[torch.Tensor]:
    values = tree_leaves(node.meta.get("example_value"))
    return [value for value in values if isinstance(value, torch.Tensor)]


def copy_region(region: Region, match: Match, args: list[Any], tx: Any) -> Any:
    """Add the nodes of a region to the graph as Dynamo does; returns the result of the call."""
    graph, tracer = tx.output.graph, tx.output.current_tracer
    variables = dict(zip(region.args, args, strict=True))
    copies = {node: variable.as_proxy().node for node, variable in variables.items()}
    for node in region.inputs:
        copies[node] = _input(match.inputs.get(node), node, tx)
    for source, value in match.shared:
        VariableBuilder(tx, source)(value)  # adds the guard that both are one object

    def argument(value: Any) -> Any:
        if type(value) is Name:
            return match.name_for(value)
        return copies[value] if isinstance(value, Node) else value

    results = region.result if isinstance(region.result, tuple) else (region.result,)
    values, run = CopiedValues(region.values), []
    for node, other in copies.items():
        values.pair(node.meta["example_value"], other.meta["example_value"])
    for node in region.nodes:
        arguments, kwargs = map_aggregate((node.args, node.kwargs), argument)
        copy = graph.create_node(node.op, node.target, arguments, kwargs, node.name, node.type)
        copy.meta = {key: node.meta[key] for key in node.meta if key != "example_value"}
        copies[node] = copy
        if values.are_known(node):
            value = values.copy(node.meta["example_value"])
        else:
            value = get_fake_value(copy, tx, allow_non_graph_fake=True)
            values.pair(node.meta.get("example_value"), value)
            run.append(node)
        if node in results:
            proxy = torch.fx.Proxy(copy, tracer)
            variables[node] = handle_traced_output(value, tx, proxy, {}, None, TensorVariable)
            tracer.record_proxyable_vt(variables[node])
        elif value is not None:
            set_example_value(copy, value)
    values.end()
    if any(form_of_node(node) != form_of_node(copies[node]) for node in run):
        raise RuntimeError("an operator has results of another form for another name")
    none = ConstantVariable.create(None)
    items = [none if node is None else variables[node] for node in results]
    return TupleVariable(items) if isinstance(region.result, tuple) else items[0]


def _input(parts: tuple[Any, ...] | None, node: Node, tx: Any) -> Node:
    """The placeholder that stands for an input of a region: of its own for a weight or a label."""
    if parts is None:
        return node
    if len(parts) == 3:
        return tx.output.synthetic_graph_input(*parts).as_proxy().node  # type: ignore[no-any-return]
    source, value = parts
    return VariableBuilder(tx, source)(value).as_proxy().node  # type: ignore[no-any-return]


def form_of_node(node: Node) -> Any:
    """What is compared of the results of two nodes."""
    return tree_map(
        lambda value: metadata(value) if isinstance(value, torch.Tensor) else repr(value),
        node.meta.get("example_value"),
    )
