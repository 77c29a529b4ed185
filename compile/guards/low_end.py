"""Serve small batches padded, where a guard holds only from some number of tokens on.

Mamba models, for example, ask whether there is more than one token. Padding a smaller batch up to
the first size at which the guard holds is right only if the model computes the same for its real
rows there. So the model itself is run at sizes below the low end and at the low end, and the real
rows are compared. Splitting ops need a running step: in both runs they return and write a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph
from torch.fx.node import map_arg

from ...torch_compat.basics.distributed import without_other_ranks
from ...torch_compat.basics.ops import overload_of
from ...torch_compat.basics.tensors import tree_leaves
from ..conditions.places import Place
from ..held_values import trial_run
from ..ir.config import TOKENS, CompileConfig
from ..ir.ops import op_names
from ..trace.dynamo import Trace
from ..trace.examples import Dims, Examples, Leaf
from ..trace.mutations import written_placeholders
from ..trace.splitting import is_splitting
from ..trace.symbols import symbol_labels
from .numerics_check import WithoutStep
from .tolerance import compare


def padding_difference(
    model: torch.nn.Module, traced: Trace, config: CompileConfig, sizes: Iterator[int], low: int
) -> str | None:
    """How the model at one of `sizes` differs from itself padded to `low`; None if it does not."""
    ops = _splitting_ops(traced.graph.graph, config)
    padded = _made_up(traced.examples, low)
    placed = [
        (traced.tensors[node], traced.tensors[node].clone())
        for node in written_placeholders(traced)
        if isinstance(traced.sources[node], Place)
    ]
    try:
        return _difference(model, traced, padded, sizes, ops)
    finally:
        with torch.inference_mode():  # in which tensors of either kind may be written
            for tensor, before in placed:
                tensor.copy_(before)


def _difference(
    model: torch.nn.Module, traced: Trace, padded: Examples, sizes: Iterator[int], ops: set[Any]
) -> str | None:
    whole, low = _run(model, padded, ops), padded.size_of(TOKENS)
    for size in sizes:
        small = padded.with_tokens(size)
        try:
            got = _run(model, small, ops)
            returned = _returned(traced, whole, size)
            wrong = compare(got, returned, partial(_run, model, small, ops))
        except Exception as error:
            return f"at {size} it raises {type(error).__name__}: {error}"
        if wrong is not None and wrong.unknown:
            return f"at {size} its result cannot be compared: {wrong.unknown}"
        if wrong is not None:
            return f"at {size} its result differs from that of the batch padded to {low}"
    return None


def _splitting_ops(graph: Graph, config: CompileConfig) -> set[Any]:
    splits = is_splitting(graph, config)
    return {overload_of(node) for node in graph.nodes if op_names(node) and splits(node)}


def _made_up(examples: Examples, low: int) -> Examples:
    """Arguments with `low` tokens: small random numbers, zeros for other dtypes."""
    generator = torch.Generator("cpu").manual_seed(0)

    def made_up(tensor: Tensor, dims: Dims) -> Tensor:
        sizes = zip(tensor.shape, dims, strict=True)
        shape = [low if dim == TOKENS else size for size, dim in sizes]
        numbers = torch.zeros(shape, device="cpu")
        if tensor.dtype.is_floating_point:
            numbers.normal_(std=0.5, generator=generator)
        return numbers.to(tensor.device, tensor.dtype)

    return examples.with_tensors(made_up)


def _run(model: torch.nn.Module, examples: Examples, ops: set[Any]) -> list[Any]:
    """The leaves of the model's result; buffers, arguments and attributes stay as they are."""
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = examples.with_tensors(lambda tensor, _: tensor.clone()).call_arguments()
    with (
        trial_run(model),
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        without_other_ranks(),
        WithoutStep(ops),
    ):
        result = torch.func.functional_call(model, copies, args, kwargs)
    return tree_leaves(result)


def _returned(traced: Trace, whole: list[Any], num_tokens: int) -> list[Any]:
    """What a step of `num_tokens` returns of the leaves of a padded result: the part that has the
    sizes which the trace states, whatever the model's own result has."""
    sizes = {
        symbol: num_tokens if label == TOKENS else traced.examples.size_of(label)
        for symbol, label in symbol_labels(traced).items()
    }
    outputs = map_arg(traced.outputs(), lambda node: node.meta["example_value"])
    stated = {f"o{index}": value for index, value in enumerate(outputs)}
    for node, source in traced.sources.items():
        if isinstance(source, Leaf):
            stated[f"L.{source.label}"] = node.meta["example_value"]

    def size(value: Any) -> int:
        return int(traced.symbol_of(value).xreplace(sizes))

    returned = []
    for ref, leaf in zip(tree_leaves(traced.structure), whole, strict=True):
        value = stated.get(ref)
        if isinstance(value, Tensor):
            returned.append(leaf[tuple(slice(0, size(each)) for each in value.shape)])
        else:
            returned.append(size(value) if isinstance(value, torch.SymInt) else leaf)
    return returned
