"""Operators by name, and what their schemas say they write to.

`ns::op` names all overloads of an operator, `ns::op.overload` one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from ...torch_compat.basics.ops import (
    is_higher_order,
    is_op,
    mutated_arguments,
    op_name,
    overload_name,
    overload_of,
)
from ...torch_compat.basics.tensors import (
    LEAVES,
    FakeTensorMode,
    LightDispatchMode,
    is_fake,
    storage_id,
    tree_leaves,
    tree_map_only,
)

ALLOCATIONS = frozenset(
    {torch.empty, torch.empty_like, torch.empty_strided, "new_empty", "new_empty_strided"}
)
"""Targets of nodes that allocate a tensor without filling it."""


def is_custom(target: Any) -> bool:
    """Whether `target` is an operator that is not one of torch's own."""
    return is_op(target) and not op_name(target).startswith(("aten::", "prims::"))


def op_names(node: Node) -> frozenset[str]:
    """The names by which `splitting_ops` may refer to a node: `ns::op` and `ns::op.overload`."""
    if not is_op(node.target):
        return frozenset()
    return frozenset({op_name(node.target), overload_name(overload_of(node))})


def resolve_op(name: str) -> Callable[..., Any]:
    """The operator overload called `ns::op.overload`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op: Callable[..., Any] = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return op


def is_registered(name: str) -> bool:
    """Whether there is an operator called `ns::op` or `ns::op.overload`."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return found is not None and (not overload or hasattr(found, overload))


def where_written(expected: Tensor, other: Tensor, got: Tensor) -> Tensor:
    """`got`, but `expected` where `other`, of other uninitialized memory, differs from it: any
    value is right there."""
    same = (expected == other) | (expected.isnan() & other.isnan())
    return torch.where(same, got, expected)


class FilledMemory(Interpreter):
    """Runs a graph with allocations that hold `fill`."""

    def __init__(self, graph: GraphModule, fill: int) -> None:
        super().__init__(graph)
        self._fill = fill

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.target in ALLOCATIONS and isinstance(value, Tensor):
            value.fill_(self._fill)
        return value


def clones(inputs: Sequence[Any]) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


class FakeWrites(LightDispatchMode):
    """Records which tensors the operators called inside, in a fake mode, write to.

    A fake is written in place of a real tensor: by itself a fake mode runs an operator that is
    called with real tensors alone.
    """

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes = fakes
        self._storages: set[int] = set()

    def include(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._storages

    def _fake(self, tensor: Tensor) -> Tensor:
        return tensor if is_fake(tensor) else self._fakes.from_tensor(tensor, static_shapes=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if is_higher_order(func):
            return func(*args, **given)  # fake modes have rules for it
        written = list(written_by(func, args, given))
        if not all(map(is_fake, written)):
            args, given = tree_map_only(Tensor, self._fake, (args, given))
            written = list(written_by(func, args, given))
        self._storages |= {storage_id(tensor) for tensor in written}
        return func(*args, **given)


def written_by(op: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that the schema of `op` says it writes to."""
    for given in mutated_arguments(op, args, kwargs):
        yield from tensors_in(given)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors inside nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    kind = type(value)
    if kind is list or kind is tuple or kind is dict:  # as torch's own walk, at a tenth of the time
        items = value.values() if kind is dict else value
        return [tensor for item in items for tensor in tensors_in(item)]
    if value is None or kind in LEAVES:
        return []
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
