"""Serve small batches padded, where a guard holds only from some number of tokens on.

Mamba models, for example, ask whether there is more than one token. Padding a smaller batch up to
the first size at which the guard holds is right only if the model computes the same for its real
rows there. So the model itself is run at sizes below the low end and at the low end, and the real
rows are compared. Splitting ops need a running step: in both runs they return and write a constant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph

from ...torch_compat.basics.distributed import without_other_ranks
from ...torch_compat.basics.ops import overload_of
from ...torch_compat.basics.tensors import tree_leaves
from ..conditions.places import Place
from ..ir.config import TOKENS, CompileConfig
from ..ir.ops import op_names
from ..trace.dynamo import Trace
from ..trace.examples import Dims, Examples
from ..trace.mutations import written_placeholders
from ..trace.splitting import is_splitting
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
        return _difference(model, padded, sizes, low, ops)
    finally:
        with torch.inference_mode():  # in which tensors of either kind may be written
            for tensor, before in placed:
                tensor.copy_(before)


def _difference(
    model: torch.nn.Module, padded: Examples, sizes: Iterator[int], low: int, ops: set[Any]
) -> str | None:
    expected = _run(model, padded, ops)
    for size in sizes:
        small = padded.with_tokens(size)
        try:
            got = _run(model, small, ops)
            same_size = list(starmap(_cut, zip(got, expected, strict=False)))
            wrong = compare(got, same_size, partial(_run, model, small, ops))
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
    """The leaves of the model's result; its buffers and arguments stay as they are."""
    copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    args, kwargs = examples.with_tensors(lambda tensor, _: tensor.clone()).call_arguments()
    with (
        torch.no_grad(),
        torch.random.fork_rng(devices=[]),
        without_other_ranks(),
        WithoutStep(ops),
    ):
        result = torch.func.functional_call(model, copies, args, kwargs)
    return tree_leaves(result)


def _cut(small: Any, padded: Any) -> Any:
    """The part of a padded result that has the shape of the small one, if it has that."""
    if not isinstance(small, Tensor) or small.dim() != padded.dim():
        return padded
    return padded[tuple(slice(0, size) for size in small.shape)]
