"""Example inputs for a trace: built from declared shapes, or checked against them.

Dynamic dimensions are declared per input in `Config.inputs`. Without a declaration the choice must
be unique: all sizes above one in the example inputs are equal, and that size is the token count.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from types import NoneType, UnionType
from typing import Any, get_args, get_type_hints

import torch

from ...errors import (
    ArgumentClassUnknown,
    ExampleInputsMissing,
    ExampleMismatch,
    InvalidSetting,
    NotPortable,
    UndeclaredDynamicShape,
    UnknownInput,
)
from ...torch_compat.basics.tensors import (
    containers_with_paths,
    leaves_with_paths,
    tree_leaves,
    tree_map,
    tree_map_only,
)
from ...torch_compat.tracing.dynamo import mark_dynamic
from ..ir.compilation import ExampleArguments
from ..ir.config import TOKENS, CompileConfig, InputSpec, call_forms
from ..ir.plan import Constant, Container, Path, dotted
from ..ir.serialization import decode, dtype_name, encode

# Sizes that no model treats specially: a guard such as T % 8 == 0 must fail and be reported.
# Independent sizes differ where their limits allow it, so that no equality holds by accident.
_SIZES = (17, 19, 23, 29, 31, 37, 13, 11, 7, 5, 67, 131, 257, 521, 1031, 2053, 4099, 8209)


@dataclass(frozen=True)
class Leaf:
    """One tensor, number or None inside the arguments."""

    path: Path
    value: Any

    @property
    def label(self) -> str:
        return dotted(self.path)


VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

Dims = list[str | None]
"""Of each dimension the name of its symbol, None for a fixed size."""


@dataclass(frozen=True)
class Examples:
    """Arguments of one traced call; `symbols` maps (label, dim) to a symbol's name."""

    arguments: dict[str, Any]
    signature: inspect.Signature
    symbols: dict[tuple[str, int], str]

    def leaves(self) -> list[Leaf]:
        return leaves(self.arguments)

    def constants(self) -> tuple[Constant, ...]:
        """The arguments that are taken as fixed: all that are no tensors."""
        found = [leaf for leaf in self.leaves() if not isinstance(leaf.value, torch.Tensor)]
        paths = {leaf.path for leaf in found}
        for path, value in containers_with_paths(self.arguments):
            if is_dataclass(value) and not isinstance(value, Mapping):
                none = [(*path, f.name) for f in fields(value) if getattr(value, f.name) is None]
                found += [Leaf(each, None) for each in none if each not in paths]  # no leaves
        return tuple(
            Constant(path=leaf.path, value=encode(leaf.value))
            if _is_portable(leaf.value)
            else Constant(path=leaf.path, value=None, is_default=True)
            for leaf in found
        )

    def containers(self, read: Collection[Path] | None = None) -> tuple[Container, ...]:
        """What holds the leaves, outer ones first; an empty `*args` or `**kwargs` is left out.

        And tensors that are not `read`, which a step must have, too.
        """
        variadic = [n for n, p in self.signature.parameters.items() if p.kind in VARIADIC]
        held = [
            (path, value)
            for path, value in containers_with_paths(self.arguments)
            if path and (value or len(path) > 1 or path[0] not in variadic)
        ]
        containers = [Container.of(path, value) for path, value in held]
        for leaf in self.leaves():
            if read is not None and isinstance(leaf.value, torch.Tensor) and leaf.path not in read:
                tensor = Container.of(leaf.path, leaf.value)
                if isinstance(tensor.keys, tuple):  # None of a subclass
                    dtype, *sizes = tensor.keys
                    names = [self.symbols.get((leaf.label, dim), n) for dim, n in enumerate(sizes)]
                    tensor = tensor.model_copy(update={"keys": (dtype, *names)})
                containers.append(tensor)
        return tuple(containers)

    def call_arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = inspect.BoundArguments(self.signature, dict(self.arguments))
        return bound.args, bound.kwargs

    def with_tensors(self, change: Callable[[torch.Tensor, Dims], torch.Tensor]) -> Examples:
        """The same with `change(tensor, dims)` for each tensor."""
        remaining = iter(self.leaves())

        def changed(value: Any) -> Any:
            label = next(remaining).label
            if not isinstance(value, torch.Tensor):
                return value
            return change(value, [self.symbols.get((label, dim)) for dim in range(value.dim())])

        return replace(self, arguments=tree_map(changed, self.arguments))

    def with_tokens(self, num_tokens: int) -> Examples:
        """The same with the first `num_tokens` tokens, repeated where there are fewer."""

        def sized(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
            for dim, symbol in enumerate(dims):
                if symbol == TOKENS:
                    rows = torch.arange(num_tokens, device=tensor.device) % tensor.size(dim)
                    tensor = tensor.index_select(dim, rows)
            return tensor

        return self.with_tensors(sized)

    def size_of(self, symbol: str) -> int:
        """The size that a declared symbol has."""
        sizes = {leaf.label: leaf.value for leaf in self.leaves()}
        place = next(place for place, name in self.symbols.items() if name == symbol)
        return int(sizes[place[0]].size(place[1]))


def leaves(arguments: dict[str, Any]) -> list[Leaf]:
    """All leaves of the arguments with their paths, in pytree order."""
    return [Leaf(path, value) for path, value in leaves_with_paths(arguments)]


def example_inputs(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    given: ExampleArguments | None,
) -> Examples:
    """Arguments to trace with: `given` (args, kwargs), or built from `config.inputs`.

    Raises ExampleInputsMissing, ExampleMismatch, UnknownInput or UndeclaredDynamicShape.
    """
    signature = inspect.signature(model.forward)
    if given is None:
        given = (), _built(_evaluated(model, signature), config, device)
    bound = _bound(signature, given)
    _check_classes(bound)
    specs = config.input_specs() or _inferred(leaves(bound.arguments))
    symbols = _declared(specs, leaves(bound.arguments), config)
    return Examples(dict(bound.arguments), signature, symbols).with_tensors(_contiguous)


def _evaluated(model: torch.nn.Module, signature: inspect.Signature) -> inspect.Signature:
    """`signature` with the classes that annotations name, if all of them can be evaluated."""
    try:
        return inspect.signature(model.forward, eval_str=True)
    except Exception:  # a name that is imported for type checkers alone
        return signature


def _bound(signature: inspect.Signature, given: Any) -> inspect.BoundArguments:
    """`given` as arguments of the model's forward; raises InvalidSetting for another form."""
    expected = "(args, kwargs) of one call of the model's forward, such as ((input_ids,), {})"
    pair = isinstance(given, (tuple, list)) and len(given) == 2
    if not (pair and isinstance(given[0], (tuple, list)) and isinstance(given[1], dict)):
        kind, reason = type(given).__name__, "it is not (args, kwargs)"
        raise InvalidSetting(name="examples", value=kind, reason=reason, expected=expected)
    args, kwargs = tree_map_only(torch.Tensor, torch.Tensor.detach, given)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        value = f"{len(args)} args, kwargs {list(kwargs)}"
        raise InvalidSetting(
            name="examples", value=value, reason=str(error), expected=expected
        ) from None
    bound.apply_defaults()
    return bound


def _check_classes(bound: inspect.BoundArguments) -> None:
    """Raise ArgumentClassUnknown for an object that a step's could not be compared with.

    A parameter's default without tensors can be: by identity.
    """
    for path, value in containers_with_paths(bound.arguments):
        if isinstance(value, Mapping) and not all(isinstance(key, (str, int)) for key in value):
            kind = (
                f"{'.'.join(Container.of(path, value).kind)} with other keys than texts and numbers"
            )
            raise ArgumentClassUnknown(name=dotted(path), kind=kind)
    for leaf in leaves(bound.arguments):
        if isinstance(leaf.value, torch.Tensor) or _is_portable(leaf.value):
            continue
        held = getattr(leaf.value, "__dict__", {}).values()
        parameter = bound.signature.parameters[str(leaf.path[0])]
        is_default = len(leaf.path) == 1 and leaf.value is parameter.default
        holds_tensors = any(isinstance(each, torch.Tensor) for each in tree_leaves(list(held)))
        if holds_tensors or not is_default:
            kind = ".".join(Container.of(leaf.path, leaf.value).kind)
            raise ArgumentClassUnknown(name=leaf.label, kind=kind)


def _is_portable(value: Any) -> bool:
    """Whether another process can rebuild a value that is no container."""
    try:
        return bool(decode(encode(value)) == value)
    except (NotPortable, ImportError):
        return False


def _contiguous(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """A copy for a tensor of dynamic size, contiguous, which is what steps pass on.

    The strides of a dimension of size 1 and memory that two share mean nothing.
    """
    return tensor.clone(memory_format=torch.contiguous_format) if any(dims) else tensor


def mark(examples: Examples, config: CompileConfig) -> None:
    """Mark the dynamic dimensions for Dynamo."""
    for leaf in examples.leaves():
        if isinstance(leaf.value, torch.Tensor):
            for dim in range(leaf.value.dim()):
                if symbol := examples.symbols.get((leaf.label, dim)):
                    limits = config.limits(symbol)
                    mark_dynamic(leaf.value, dim, symbol, limits, config.code.dynamic_shapes.value)


def _built(
    signature: inspect.Signature, config: CompileConfig, device: torch.device
) -> dict[str, Any]:
    (form,) = call_forms(config.inputs)
    absent = [name for name, text in form.items() if text is None]
    sizes = symbol_sizes(config)
    nested: dict[str, Any] = {}
    for label, spec in config.input_specs().items():
        shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
        *outer, last = label.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
        place[last] = torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=device)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    built: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if name in absent:
            built[name] = None
        elif name in nested:
            of_keywords = parameter.kind is inspect.Parameter.VAR_KEYWORD
            given = nested[name] if of_keywords else _container(nested[name], kinds.get(name))
            built |= given if of_keywords else {name: given}
        elif parameter.default is inspect.Parameter.empty and parameter.kind not in VARIADIC:
            raise ExampleInputsMissing(name=name)
    return built


def _container(value: Any, kind: Any = None) -> Any:
    """Nested dicts of tensors as `kind`, a dataclass or NamedTuple that the forward's annotation
    names, alone or beside None; else as lists where the keys are the positions of one."""
    if not isinstance(value, dict):
        return value
    if isinstance(kind, UnionType):
        kind = next(each for each in get_args(kind) if each is not NoneType)
    if isinstance(kind, type) and (is_dataclass(kind) or hasattr(kind, "_fields")):
        fields = get_type_hints(kind)
        given = {name: _container(item, fields.get(name)) for name, item in value.items()}
        try:
            return kind(**given)
        except TypeError as error:
            raise InvalidSetting(
                name="inputs",
                value=", ".join(value),
                reason=f"{kind.__name__} cannot be made of these: {error}",
                expected="names of all its fields without a default, or pass examples",
            ) from None
    items = {name: _container(item) for name, item in value.items()}
    places = [str(place) for place in range(len(items))]
    return [items[place] for place in places] if {*items} == {*places} else items


def symbol_sizes(config: CompileConfig) -> dict[str, int]:
    """The size that each declared symbol has in the examples."""
    names = dict.fromkeys(
        dim for spec in config.input_specs().values() for dim in spec.shape if isinstance(dim, str)
    )
    sizes: dict[str, int] = {}
    for name in names:
        low, high = config.limits(name)
        sizes[name] = example_size(low, high, sizes.values())
    return sizes


def example_size(low: int, high: int, taken: Collection[int] = ()) -> int:
    """A size to trace with, if possible none of those that are `taken`."""
    candidates = itertools.chain(_SIZES, range(high, low - 1, -1))
    return next((n for n in candidates if low <= n <= high and n not in taken), high)


def _inferred(found: list[Leaf]) -> dict[str, InputSpec]:
    tensors = [leaf for leaf in found if isinstance(leaf.value, torch.Tensor)]
    sizes = {size for leaf in tensors for size in leaf.value.shape if size > 1}
    if len(sizes) != 1:
        shapes = ", ".join(f"{leaf.label}: {tuple(leaf.value.shape)}" for leaf in tensors)
        raise UndeclaredDynamicShape(shapes=shapes)
    return {
        leaf.label: InputSpec(
            dtype=dtype_name(leaf.value.dtype),
            shape=tuple(TOKENS if size > 1 else size for size in leaf.value.shape),
        )
        for leaf in tensors
    }


def _declared(
    specs: dict[str, InputSpec], found: list[Leaf], config: CompileConfig
) -> dict[tuple[str, int], str]:
    by_label = {leaf.label: leaf.value for leaf in found}
    symbols = {}
    for label, spec in specs.items():
        if label not in by_label:
            raise UnknownInput(name=label, known=", ".join(by_label))
        value = by_label[label]
        if value is None:
            continue
        if not _fits(value, spec):
            raise ExampleMismatch(name=label, actual=_described(value), expected=str(spec))
        symbols.update({(label, dim): s for dim, s in enumerate(spec.shape) if isinstance(s, str)})
    _check_equal(symbols, by_label)
    return symbols


def _check_equal(symbols: dict[tuple[str, int], str], values: dict[str, Any]) -> None:
    """Sizes of one name are equal in the examples; raises ExampleMismatch."""
    first: dict[str, tuple[str, int]] = {}
    for (label, dim), symbol in symbols.items():
        other, size = first.setdefault(symbol, (label, values[label].size(dim)))
        if values[label].size(dim) != size:
            expected = f"{symbol} = {size} in dimension {dim}, as {other!r} has it"
            raise ExampleMismatch(name=label, actual=_described(values[label]), expected=expected)


def _fits(value: Any, spec: InputSpec) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and dtype_name(value.dtype) == spec.dtype
        and value.dim() == len(spec.shape)
        and all(isinstance(s, str) or s == n for s, n in zip(spec.shape, value.shape, strict=True))
    )


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(InputSpec(dtype=dtype_name(value.dtype), shape=tuple(value.shape)))
    return type(value).__name__
