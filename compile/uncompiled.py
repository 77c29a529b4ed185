"""A model that is not compiled: one piece, which calls its forward as it is.

For telling whether compilation is at fault. Nothing is traced; the form of the result is learned
from a run on fake tensors. There are no splitting calls to put graphs between, so it runs in NONE.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

from .compiled_model import CompiledModel
from .config import CompileConfig
from .examples import ExampleArguments, Examples, Leaf, example_inputs
from .literal import Ref, encode
from .plan import CompiledSpan, Constant, PieceStep, Plan, Result, Symbol, UniquePiece, UserInput


def uncompiled_model(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    given: ExampleArguments | None,
) -> CompiledModel:
    """`model` behind the interface of a compiled one; raises the errors of `example_inputs`."""
    examples = example_inputs(model, config, device, given)
    tensors = [leaf for leaf in examples.leaves() if isinstance(leaf.value, Tensor)]
    symbols = _symbols(tensors, examples, config)
    result = _fake_result(model, examples)
    found = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    outs = tuple(f"t{index}" for index in range(len(found)))
    names = iter(Ref(f"o{index}") for index in range(len(found)))
    plan = Plan(
        inputs=tuple(_input(i, leaf, examples, symbols) for i, leaf in enumerate(tensors)),
        constants=tuple(
            Constant(path=leaf.path, value=encode(leaf.value))
            for leaf in examples.leaves()
            if isinstance(leaf.value, (bool, int, float, str))
        ),
        weights=(),
        symbols=tuple(symbols.values()),
        pieces=(UniquePiece(digest="", nodes=1, sizes=()),),
        spans=(CompiledSpan(low=1, high=config.max_num_tokens, artifacts=(0,)),),
        steps=(PieceStep(piece=0, args=tuple(f"i{i}" for i in range(len(tensors))), outs=outs),),
        results=tuple(
            Result(name=name, dtype=_dtype(tensor), shape=tuple(tensor.shape))
            for name, tensor in zip(outs, found, strict=True)
        ),
        structure=encode(pytree.tree_map_only(Tensor, lambda _: next(names), result)),
        parameters=tuple(examples.signature.parameters),
    )
    return CompiledModel(plan, (_forward(model, examples),), {}, from_bundle=False)


def _fake_result(model: torch.nn.Module, examples: Examples) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True) as fake, torch.no_grad():
        args, kwargs = pytree.tree_map_only(Tensor, fake.from_tensor, examples.call_arguments())
        return model(*args, **kwargs)


def _forward(model: torch.nn.Module, examples: Examples) -> Callable[[list[Tensor]], Any]:
    """The model's forward as a function of its tensors, in order, to its result's, in order."""
    leaves, form = pytree.tree_flatten(dict(examples.arguments))
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def forward(tensors: list[Tensor]) -> tuple[Tensor, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        arguments = pytree.tree_unflatten(filled, form)
        bound = inspect.BoundArguments(examples.signature, arguments)
        result = model(*bound.args, **bound.kwargs)
        return tuple(leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor))

    return forward


def _symbols(tensors: list[Leaf], examples: Examples, config: CompileConfig) -> dict[str, Symbol]:
    """The dynamic sizes by label, each read where it occurs first."""
    found: dict[str, Symbol] = {}
    for index, leaf in enumerate(tensors):
        for dim in range(leaf.value.dim()):
            label = examples.symbols.get((leaf.label, dim))
            if label is None or label in found:
                continue
            low, high = config.limits(label)
            name = f"s{len(found)}"
            found[label] = Symbol(
                name=name, label=label, source=f"i{index}", dim=dim, low=low, high=high
            )
    return found


def _input(index: int, leaf: Leaf, examples: Examples, symbols: dict[str, Symbol]) -> UserInput:
    labels = (examples.symbols.get((leaf.label, dim)) for dim in range(leaf.value.dim()))
    return UserInput(
        name=f"i{index}",
        path=leaf.path,
        dtype=_dtype(leaf.value),
        device=str(leaf.value.device),
        shape=tuple(
            symbols[label].name if label else size
            for label, size in zip(labels, leaf.value.shape, strict=True)
        ),
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
