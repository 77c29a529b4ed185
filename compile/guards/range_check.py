"""Check the shapes of a piece at the ends of the served range by running it on fake tensors.

Some specializations leave no guard: `squeeze(0)` keeps a symbolic dimension unless its size is 1.
So each piece is run with concrete sizes, and the shape of every value is compared with its symbolic
shape. Each unique piece is checked once: if every piece returns the shapes of the trace for inputs
with the shapes of the trace, so does the model. The cost does not grow with the number of layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Interpreter, Node

from ...torch_compat.basics.ops import HigherOrderOperator
from ...torch_compat.basics.symbolic import UNBOUNDED, traced_value
from ...torch_compat.basics.tensors import DynamicOutputShapeException, FakeTensorMode
from ..ir.locations import first_line, node_location
from ..ir.serialization import dtype_name
from ..trace.symbols import Sizes, input_at, size_at


@dataclass(eq=False)
class ShapeDifference(Exception):
    """A node whose value differs from the trace."""

    where: str | None
    actual: str
    expected: str


def corners(limits: dict[sympy.Symbol, tuple[int, int]], env: Any = None) -> Iterator[Sizes]:
    """Every combination of the lowest and highest size of each symbol.

    No tensor has the highest size of a range without an end: it is left out. A number that may be
    negative is that of the trace, which the shape environment `env` has.
    """
    ends = [
        dict.fromkeys(end for end in span if end < UNBOUNDED)
        if span[0] >= 0
        else [traced_value(env, symbol)]
        for symbol, span in limits.items()
    ]
    for choice in itertools.product(*ends):
        yield dict(zip(limits, choice, strict=True))


def difference_at(graph: GraphModule, sizes: Sizes) -> ShapeDifference | None:
    """The first node of a piece that has another shape or dtype at `sizes`, or that fails there.

    Where a shape depends on data, only the nodes before it are compared.
    """
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [input_at(node, sizes) for node in graph.graph.find_nodes(op="placeholder")]
        if any(value is None for value in inputs):
            return None
        try:
            _Run(graph, sizes).run(*inputs)
        except ShapeDifference as difference:
            return difference
        except DynamicOutputShapeException:
            return None
    return None


class _Run(Interpreter):
    """Runs node by node and stops at the first difference."""

    def __init__(self, graph: GraphModule, sizes: Sizes) -> None:
        super().__init__(graph)
        self._sizes = sizes

    def run_node(self, n: Node) -> Any:
        expected = self._form(n.meta.get("example_value"))
        try:
            value = super().run_node(n)
        except DynamicOutputShapeException:
            raise
        except Exception as error:
            if isinstance(n.target, HigherOrderOperator):
                raise DynamicOutputShapeException(n.target) from error  # type: ignore[arg-type]
            reason = f"an error ({first_line(error)})"
            raise ShapeDifference(node_location(n), reason, str(expected)) from error
        if expected is not None and (actual := self._form(value)) != expected:
            raise ShapeDifference(node_location(n), str(actual), expected)
        return value

    def _form(self, value: Any) -> str | None:
        """Shape and dtype as text; None for a value without a shape or one that depends on data."""
        match value:
            case torch.Tensor():
                shape = [size_at(size, self._sizes) for size in value.shape]
                return None if None in shape else f"{dtype_name(value.dtype)}{shape}"
            case torch.Size() | tuple() | list() if value:
                forms = [self._form(item) for item in value]
                return None if None in forms else f"({', '.join(map(str, forms))})"
            case torch.SymInt() | int() if not isinstance(value, bool):
                size = size_at(value, self._sizes)
                return None if size is None else str(size)
        return None
