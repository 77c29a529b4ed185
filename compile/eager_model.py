"""A model that is not traced: its only piece calls its forward.

For models that cannot be traced, and to find out whether compilation causes a problem. Its graphs
break at splitting functions while it runs. The form of its result is found by two runs on fake
tensors of different sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import NotPortable, ResultFormUnknown
from ..torch_compat.basics.symbolic import Symbolic
from ..torch_compat.basics.tensors import (
    fresh_fake_mode,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from .held_values import trial_run
from .ir.compilation import CompileRequest
from .ir.config import TOKENS, CompileConfig
from .ir.locations import error_line, first_line
from .ir.ops import FakeWrites
from .ir.plan import (
    CompiledRange,
    PieceStep,
    Plan,
    PlanPiece,
    Result,
    SizeUse,
    Symbol,
    UserInput,
    evaluated,
)
from .ir.serialization import Ref, dtype_name, encode, encode_result, with_refs
from .plan.compiled_model import CompiledModel
from .plan.join_plans import join_forms
from .trace.examples import Dims, Examples, Leaf, example_inputs
from .trace.size_uses import uses_of_forward

_OTHER_SIZES = (41, 43, 47, 53, 59, 61)
"""Sizes that no example input has."""


def eager_model(request: CompileRequest) -> CompiledModel:
    """The model, called eagerly, with the interface of a compiled one.

    Raises ResultFormUnknown and the errors of `example_inputs`.
    """
    return _of_forms(request, _eager_form)


def _eager_form(request: CompileRequest) -> CompiledModel:
    examples = example_inputs(request.model, request.config, request.device, request.examples)
    symbols = list(_symbols(_tensors(examples), examples, request.config).values())
    form = _result_form(request.model, examples, symbols)
    compiled = _with_result(
        request.model, request.config, examples, form, partial(_tensors_as_stated, form[0])
    )
    size_uses = tuple(_size_uses(request, examples, compiled.plan))
    return replace(compiled, plan=compiled.plan.model_copy(update={"size_uses": size_uses}))


def uncompiled_model(request: CompileRequest) -> CompiledModel:
    """The model, called eagerly, ready at once: its whole result is one value of unknown form.

    Steps can run it on their real inputs. Padding and captures need the form: `eager_model`.
    Raises the errors of `example_inputs`.
    """
    return _of_forms(request, _uncompiled_form)


def _of_forms(
    request: CompileRequest, of_form: Callable[[CompileRequest], CompiledModel]
) -> CompiledModel:
    """The model of all call forms, with one piece for each."""
    models = [of_form(form) for form in request.forms()]
    plans = []
    for number, plan in enumerate(model.plan for model in models):
        ranges = [each.model_copy(update={"artifacts": (number,)}) for each in plan.ranges]
        plans.append(plan.model_copy(update={"ranges": tuple(ranges)}))
    pieces = tuple(piece for model in models for piece in model.pieces)
    return replace(models[0], plan=join_forms(plans), pieces=pieces)


def _uncompiled_form(request: CompileRequest) -> CompiledModel:
    examples = example_inputs(request.model, request.config, request.device, request.examples)
    written = [False] * len(_tensors(examples))
    form = encode(Ref("o0")), (Result(name="t0", dtype="", shape=()),), written
    return _with_result(request.model, request.config, examples, form, lambda result: [result])


ResultForm = tuple[Any, tuple[Result, ...], list[bool]]
"""The encoded structure of the result, its tensors, and which inputs are written to."""


def _with_result(
    model: torch.nn.Module,
    config: CompileConfig,
    examples: Examples,
    form: ResultForm,
    results_of: Callable[[Any], list[Any]],
) -> CompiledModel:
    """The model as one piece; `results_of` gives the parts of a result that `form` names."""
    tensors = _tensors(examples)
    symbols = _symbols(tensors, examples, config)
    structure, results, written = form
    outs = tuple(result.name for result in results)
    plan = Plan(
        inputs=tuple(
            _input(i, leaf, examples, symbols, written[i]) for i, leaf in enumerate(tensors)
        ),
        constants=examples.constants(),
        containers=examples.containers(),
        weights=(),
        symbols=tuple(symbols.values()),
        pieces=(PlanPiece(digest="", nodes=1, sizes=()),),
        ranges=(
            CompiledRange(low=config.min_num_tokens, high=config.max_num_tokens, artifacts=(0,)),
        ),
        steps=(PieceStep(piece=0, args=tuple(f"i{i}" for i in range(len(tensors))), outs=outs),),
        results=results,
        structure=structure,
        parameters=tuple(examples.signature.parameters),
    )
    forward = _forward(model, examples, results_of)
    return CompiledModel(plan, (forward,), {}, model, from_bundle=False, traced=False)


def _tensors(examples: Examples) -> list[Leaf]:
    return [leaf for leaf in examples.leaves() if isinstance(leaf.value, Tensor)]


def _result_form(model: torch.nn.Module, examples: Examples, symbols: list[Symbol]) -> ResultForm:
    """The form of the result, by two runs on fake tensors; raises ResultFormUnknown."""
    sizes = _example_sizes(examples, symbols)
    others = _other_sizes(sizes, symbols)
    (first, written), (second, _) = (
        _fake_result(model, examples, each) for each in (sizes, others)
    )
    form, tensors = _without_tensors(first)
    other_form, other_tensors = _without_tensors(second)
    structure = encode_result(form)
    dims, other_dims = ([t.dim() for t in each] for each in (tensors, other_tensors))
    if structure != encode(other_form) or dims != other_dims:
        raise ResultFormUnknown(
            reason=f"at {sizes} it has other tensors, or other values beside them, than at {others}"
        )
    axes = [(symbol.name, sizes[symbol.label], others[symbol.label]) for symbol in symbols]
    results = tuple(
        Result(
            name=f"t{index}",
            dtype=dtype_name(one.dtype),
            shape=tuple(_size(*pair, axes) for pair in zip(one.shape, other.shape, strict=True)),
        )
        for index, (one, other) in enumerate(zip(tensors, other_tensors, strict=True))
    )
    return structure, results, written


def _without_tensors(result: Any) -> tuple[Any, list[Tensor]]:
    """A result with references in place of its tensors, and the tensors in order."""
    tensors: list[Tensor] = []

    def ref(value: Any) -> Ref | None:
        if not isinstance(value, Tensor):
            return None
        tensors.append(value)
        return Ref(f"o{len(tensors) - 1}")

    return with_refs(result, ref), tensors


def _tensors_as_stated(structure: Any, result: Any) -> list[Tensor]:
    """The tensors of a result in order. Raises ResultFormUnknown if the values beside them are not
    those of `structure`, which a step returns."""
    form, tensors = _without_tensors(result)
    try:
        if encode(form) == structure:
            return tensors
    except NotPortable:  # a number that is symbolic here
        pass
    raise ResultFormUnknown(reason="for some sizes it has other values beside its tensors")


def _size(one: int, other: int, axes: list[tuple[str, int, int]]) -> int | str:
    """A size that is `one` and `other` in the two runs, as an expression over the symbols."""
    if one == other:
        return one
    for name, at_one, at_other in axes:
        if one % at_one == 0 and other == one // at_one * at_other:
            return name if one == at_one else f"{one // at_one}*{name}"
    raise ResultFormUnknown(reason=f"a size is {one}, then {other}, at {axes}")


def _example_sizes(examples: Examples, symbols: list[Symbol]) -> dict[str, int]:
    tensors = _tensors(examples)
    return {s.label: tensors[int(s.source[1:])].value.size(s.dim) for s in symbols}


def _other_sizes(sizes: dict[str, int], symbols: list[Symbol]) -> dict[str, int]:
    """For each symbol a size that differs from `sizes`, if its range has another."""
    others = {}
    for symbol, size in zip(symbols, _OTHER_SIZES, strict=False):
        other = max(symbol.low, min(size, symbol.high))
        if other == sizes[symbol.label] and other > symbol.low:
            other -= 1
        others[symbol.label] = other
    return {**sizes, **others}


def _fake_result(
    model: torch.nn.Module, examples: Examples, sizes: dict[str, int]
) -> tuple[Any, list[bool]]:
    """The result for fake inputs of the given sizes, and which inputs are written to."""

    def resized(tensor: Tensor, dims: Dims) -> Tensor:
        shape = [n if s is None else sizes[s] for n, s in zip(tensor.shape, dims, strict=True)]
        return torch.empty(shape, dtype=tensor.dtype, device=tensor.device)

    try:
        fake_mode = fresh_fake_mode()  # sizes inside may depend on data
        with trial_run(model), fake_mode, torch.no_grad():
            fakes = examples.with_tensors(resized)
            args, kwargs = fakes.call_arguments()
            inputs = [leaf.value for leaf in _tensors(fakes)]
            with FakeWrites(fake_mode) as writes:
                result = model(*args, **kwargs)
            written = [writes.include(tensor) for tensor in inputs]
    except Exception as error:
        reason = f"at {sizes} it raises {type(error).__name__}: {first_line(error)}"
        raise ResultFormUnknown(where=error_line(error), reason=reason) from error
    shapes = (tensor.shape for tensor in _without_tensors(result)[1])
    if any(isinstance(each, Symbolic) for each in tree_leaves([result, *shapes])):
        raise ResultFormUnknown(reason="a size or a number of it depends on data")
    return result, written


def _size_uses(request: CompileRequest, examples: Examples, plan: Plan) -> Iterator[SizeUse]:
    """How the model uses its sizes other than as a shape, as far as it runs on fakes.

    A result that for some sizes has not those that `plan` states is a choice of each size. To look
    at it makes guards: where they do not hold is another way through the model.
    """
    differing = list[list[int]]()

    def inputs_at(num_tokens: int) -> list[tuple[Tensor, Dims]]:
        inputs = list[tuple[Tensor, Dims]]()

        def collect(tensor: Tensor, dims: Dims) -> Tensor:
            inputs.append((tensor, dims))
            return tensor

        examples.with_tokens(num_tokens).with_tensors(collect)
        return inputs

    def run(fakes: list[Tensor]) -> None:
        remaining = iter(fakes)
        args, kwargs = examples.with_tensors(lambda *_: next(remaining)).call_arguments()
        with trial_run(request.model), torch.no_grad():
            results = _tensors_as_stated(plan.structure, request.model(*args, **kwargs))
        sizes = {each.name: fakes[int(each.source[1:])].shape[each.dim] for each in plan.symbols}
        for tensor, stated in zip(results, plan.results, strict=True):
            if [*tensor.shape] != [evaluated(size, sizes) for size in stated.shape]:
                differing.append([int(size) for size in tensor.shape])

    try:
        yield from uses_of_forward(run, inputs_at, request.config.limits)
    except ResultFormUnknown:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        request.events.emit("size_uses.unknown", level=logging.INFO, reason=reason)
    if differing:
        reason = f"a result has the sizes {differing[0]}, which is another form than for most"
        request.events.emit("size_uses.unknown", level=logging.INFO, reason=reason)
        yield SizeUse(expression=TOKENS, where=None, is_choice=True)


def _forward(
    model: torch.nn.Module, examples: Examples, results_of: Callable[[Any], list[Any]]
) -> Callable[[list[Tensor]], Any]:
    """The model's forward as a function from its input tensors to the parts of its result."""
    leaves, form = tree_flatten(examples.arguments)
    places = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    called = as_it_is(model)

    def forward(tensors: list[Tensor]) -> tuple[Any, ...]:
        filled = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        arguments = tree_unflatten(filled, form)
        args, kwargs = replace(examples, arguments=arguments).call_arguments()
        return tuple(results_of(called(*args, **kwargs)))

    return forward


def as_it_is(model: torch.nn.Module) -> Callable[..., Any]:
    """A function that calls the model with the forward that it has now."""
    own = model.__dict__.get("forward")

    def call(*args: Any, **kwargs: Any) -> Any:
        called = model if model.__dict__.get("forward") is own else _with_forward(model, own)
        return called(*args, **kwargs)

    return call


def _with_forward(model: torch.nn.Module, forward: Any) -> torch.nn.Module:
    """The model with the forward of before: an engine has replaced it by one that runs steps."""
    view: torch.nn.Module = object.__new__(type(model))
    view.__dict__.update({**model.__dict__, "forward": forward})
    if forward is None:  # that of its class
        del view.__dict__["forward"]
    return view


def _symbols(tensors: list[Leaf], examples: Examples, config: CompileConfig) -> dict[str, Symbol]:
    """The dynamic sizes by label; each is read from the first dimension that has it."""
    symbols: dict[str, Symbol] = {}
    for index, leaf in enumerate(tensors):
        for dim in range(leaf.value.dim()):
            label = examples.symbols.get((leaf.label, dim))
            if label is None or label in symbols:
                continue
            low, high = config.limits(label)
            name = f"s{len(symbols)}"
            symbols[label] = Symbol(
                name=name, label=label, source=f"i{index}", dim=dim, low=low, high=high
            )
    return symbols


def _input(
    index: int, leaf: Leaf, examples: Examples, symbols: dict[str, Symbol], written: bool
) -> UserInput:
    labels = (examples.symbols.get((leaf.label, dim)) for dim in range(leaf.value.dim()))
    return UserInput(
        name=f"i{index}",
        path=leaf.path,
        dtype=dtype_name(leaf.value.dtype),
        device=str(leaf.value.device),
        shape=tuple(
            symbols[label].name if label else size
            for label, size in zip(labels, leaf.value.shape, strict=True)
        ),
        written=written,
    )
