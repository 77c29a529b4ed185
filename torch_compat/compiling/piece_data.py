"""A graph with symbolic inputs as bytes, for a process that has neither the model nor its modules.

Values of nodes are left out: compiling computes them again. Inputs are sent as sizes and strides,
since torch cannot pickle fake tensors that are views.
"""

from __future__ import annotations

import io
import pickle
import sys
from types import FunctionType
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from ..basics.patch import compiler_lock, preserve_cache_variables
from ..basics.tensors import fresh_fake_mode, is_fake, storage_id

SENT = frozenset({"stack_trace"})
"""What is sent of a node's meta."""
PRESENT = sys.stdlib_module_names | {"torch", "sympy", "mpmath", __name__.partition(".")[0]}
"""Packages whose classes and functions every process that compiles has."""


class NotData(ValueError):
    """What cannot be sent, with the reason."""


def dump_plain(value: Any) -> bytes:
    """`value` as a pickle; raises NotData if another process would need the program's modules."""
    stream = io.BytesIO()
    try:
        _PlainPickler(stream).dump(value)
    except Exception as error:
        raise _not_data(error) from error
    return stream.getvalue()


def dump_piece(graph: GraphModule, options: dict[str, Any]) -> bytes:
    """The graph, its constants, sizes and shape environment of its inputs, and `options`.

    Raises NotData.
    """
    with preserve_cache_variables():
        from torch.fx._graph_pickler import GraphPickler, Options

    class Pickler(GraphPickler):
        def reducer_override(self, value: Any) -> Any:
            _must_be_present(value)
            return super().reducer_override(value)

    values = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    kept = Options(ops_filter=None, node_metadata_key_filter=SENT.__contains__)
    with compiler_lock():
        try:
            return Pickler.dumps((graph, _forms(values), options), kept)
        except Exception as error:  # much of torch has no pickled form
            raise _not_data(error) from error


def load_piece(data: bytes) -> tuple[GraphModule, dict[str, Any]]:
    """What `dump_piece` wrote, with fake inputs; raises for an op that is not registered here."""
    from torch.fx._graph_pickler import GraphPickler

    mode = fresh_fake_mode()
    loaded: Any = GraphPickler.loads(data, mode)
    graph, forms, options = loaded
    with mode:
        for node, form in zip(graph.graph.find_nodes(op="placeholder"), forms, strict=True):
            if isinstance(form, dict):
                parameter, grad = form.pop("parameter"), form.pop("requires_grad")
                form = torch.empty_strided(**form).requires_grad_(grad)
                form = torch.nn.Parameter(form, grad) if parameter else form
            node.meta["example_value"] = form
    return graph, options


def inputs_mode(graph: Graph) -> Any:
    """The fake mode of a piece's inputs; it has their shape environment."""
    values = (node.meta["example_value"] for node in graph.find_nodes(op="placeholder"))
    return next(value.fake_mode for value in values if is_fake(value))


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        _must_be_present(value)
        return NotImplemented


def _must_be_present(value: Any) -> None:
    """Raise NotData for a class or function of the program, which is pickled as its name."""
    if isinstance(value, (type, FunctionType)) and value.__module__.split(".")[0] not in PRESENT:
        raise NotData(f"{value.__module__}.{value.__qualname__} is of the program")


def _not_data(error: Exception) -> NotData:
    return error if isinstance(error, NotData) else NotData(f"{type(error).__name__}: {error}")


def _forms(values: list[Any]) -> list[Any]:
    """Of each tensor what `empty_strided` takes; a size is sent as it is."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        raise NotData("it takes no tensor")
    if len({storage_id(tensor) for tensor in tensors}) < len(tensors):
        raise NotData("inputs share memory")
    return [_form(value) if isinstance(value, torch.Tensor) else value for value in values]


def _form(tensor: torch.Tensor) -> dict[str, Any]:
    plain = is_fake(tensor) and tensor.layout is torch.strided
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.storage_offset() != 0:
        raise NotData("an input is no plain tensor that begins at the start of its memory")
    return {
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
    }
