"""Which operator added each node of a CUDA graph, and what memory the node has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from graphlib import TopologicalSorter
from typing import Any

import torch

from ...torch_compat.basics.cuda import nodes_of_capture
from ...torch_compat.basics.cuda_nodes import DriverNode, driver_node, nodes_before
from .ownership import COMPILED_PIECE, memory_of
from .protocol import Argument, GraphNode, GraphPart

Call = tuple[str, dict[int, list[int]]]
"""An operator, and the shapes of the tensors that it takes by address."""


class NodeLog:
    """Notes the nodes that each operator adds to the capture of the current stream."""

    def __init__(self) -> None:
        self._parts: list[tuple[bool, list[tuple[Call, list[DriverNode]]]]] = []
        self._open: list[Call] = []
        self._noted = set[int]()
        self._ended = False

    @contextmanager
    def during(self, call: tuple[object, Any]) -> Iterator[None]:
        """What is added inside is of this operator, but for what operators inside of it add."""
        self._note()
        op, values = call
        shapes = {each.data_ptr(): [*each.shape] for each in memory_of(values)}
        self._open.append((str(op), shapes))
        try:
            yield
            self._note()
        finally:
            self._open.pop()

    def end(self) -> None:
        """The capture ends. A splitting op ends it inside of the operators that called it."""
        self._note()
        self._ended = True

    def _note(self) -> None:
        """Ascribe the nodes that were added since the last call."""
        if self._ended:
            return
        is_piece = any(op == COMPILED_PIECE for op, _ in self._open)
        if not self._parts or self._parts[-1][0] != is_piece:
            self._parts.append((is_piece, []))
        new = set(nodes_of_capture()) - self._noted
        self._noted |= new
        if new:
            before = {node: new.intersection(nodes_before(node)) for node in new}
            nodes = [driver_node(node) for node in TopologicalSorter(before).static_order()]
            self._parts[-1][1].append((self._open[-1] if self._open else ("", {}), nodes))

    def parts(self, pool: Any) -> list[GraphPart]:
        """The nodes of the graph that was captured into `pool`."""
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        made = [
            range(segment["address"], segment["address"] + segment["total_size"])
            for segment in segments
            if tuple(segment["segment_pool_id"]) == tuple(pool)
        ]
        return [
            GraphPart(
                is_piece, [_node(call, node, made) for call, nodes in added for node in nodes]
            )
            for is_piece, added in self._parts
        ]


def _node(call: Call, node: DriverNode, made: list[range]) -> GraphNode:
    op, shapes = call
    arguments = [
        Argument(at, any(at in each for each in made), shapes.get(at)) for at in node.pointers
    ]
    return GraphNode(op, arguments, node.kind, node.kernel, node.launch, node.unread)
