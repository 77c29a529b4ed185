"""From a call's arguments to flat tensors, and from flat results to the form the model returns.

Both are generated once from the plan as straight-line functions, so that a step traverses no tree.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from inspect import Parameter
from types import FunctionType
from typing import Any

import torch

from ...compile.ir.config import TOKENS
from ...compile.ir.plan import Container, GuardCheck, Path, Plan, Symbol, UserInput, dotted
from ...compile.ir.serialization import Ref, decode, refs, source
from ...errors import ArgumentFixed, GuardBroken, InputMismatch, SizeOutOfRange
from ...torch_compat.basics.tensors import form_test, has_own_operators, has_plain_memory

Bind = Callable[..., tuple[tuple[Any, ...], tuple[int, ...]]]
Pack = Callable[[Sequence[Any], tuple[Any, ...]], Any]


def binder(plan: Plan, signature: inspect.Signature) -> Bind:
    """A function of the number of tokens that the batch states, or None, and the parameters of the
    model's forward.

    It returns the plan's input tensors and the real size of each symbol, after checking what holds
    them, dtype, device and shape. Inputs of a form that was checked before are recognized by one
    test. It raises InputMismatch, SizeOutOfRange, GuardBroken (with `sizes` in its facts), and
    ArgumentFixed if anything else than a tensor is not what it was in the trace. Zero tokens are in
    range: an idle rank of several has none.
    """
    forms: Forms = {}
    names: dict[str, Any] = {
        "plain": _is_plain,
        "math": math,
        "at": at,
        "mismatch": _mismatch,
        "_pg_other": _other_container,
        "_pg_type": type,
        "_pg_more": more_attributes,
        "_pg_torch": torch,
        "fixed": _fixed,
        "beyond": _beyond,
        "broken": _broken,
        "_pg_forms": forms,
        "_pg_remember": partial(_remember, forms),
    }
    parameters, defaults = _parameters(signature)
    skeleton = Skeleton(plan, signature, names | defaults)
    names = skeleton.names
    body = [f"if {differs}: {error}" for differs, error in skeleton.containers()]
    body += [f"{item.name} = {skeleton.access(item.path)}" for item in plan.inputs]
    sources = {symbol.source for symbol in plan.symbols}
    body += [f"if {differs}: {error}" for differs, error in skeleton.constants()]
    tensors = "".join(f"{item.name}, " for item in plan.inputs)
    nested = " or ".join(f"{item.name}.is_nested" for item in plan.inputs)
    tokens = next((symbol.name for symbol in plan.symbols if symbol.label == TOKENS), "1")
    if tokens != "1":
        position, dim = plan.token_source()
        body += [
            "try:",
            "    _pg_same, _pg_sizes = _pg_forms[_pg_stated or"
            f" {plan.inputs[position].name}.shape[{dim}]]",
            # the test would end the process for a nested tensor
            f"    if not ({nested}) and _pg_same({tensors}): return ({tensors}), _pg_sizes",
            "except (KeyError, AttributeError, IndexError, TypeError, RuntimeError): pass",
        ]
    for index, item in enumerate(plan.inputs):
        names[f"u{index}"] = (item.label, _form(item, plan))
        names[f"d{index}"] = decode({"torch": item.dtype})
        rank = f"len(h_{item.name} := {item.name}.shape) != {len(item.shape)}"
        body.append(
            f"if not plain({item.name}) or {item.name}.dtype is not d{index}"
            f"{f' or {rank}' if item.name in sources else ''}"
            f" or {_device_test(item)}: mismatch(u{index}, {item.name})"
        )
    # the token count, which other sizes are checked with, is read first
    for index, symbol in sorted(enumerate(plan.symbols), key=lambda each: each[1].name != tokens):
        names[f"S{index}"] = symbol
        body += [
            f"{symbol.name} = h_{symbol.source}[{symbol.dim}]",
            f"if not {_served_low(symbol)} <= {symbol.name} <= {symbol.high}"
            f" and ({symbol.name} or {tokens}): beyond(S{index}, {symbol.name})",
        ]
    sizes = "".join(f"{symbol.name}, " for symbol in plan.symbols)
    for index, check in enumerate(plan.checks):
        names[f"C{index}"] = check
        holds = _renamed(check.expression, plan)
        body.append(f"if not ({holds}) and {tokens}: broken(C{index}, ({sizes}))")
    for index, item in enumerate(plan.inputs):
        shape = "".join(f"{size}, " for size in item.shape)
        actual = f"h_{item.name}" if item.name in sources else f"{item.name}.shape"
        body.append(f"if {actual} != ({shape}): mismatch(u{index}, {item.name})")
    if tokens != "1":
        body.append(f"_pg_remember({tokens}, ({tensors}), ({sizes}))")
    body.append(f"return ({tensors}), ({sizes})")
    text = "\n".join([f"def forward(_pg_stated, {parameters}):", *(f"    {line}" for line in body)])
    bind: Bind = _made(text, "forward", names)
    return bind


def fits(plan: Plan, signature: inspect.Signature) -> Callable[..., bool]:
    """A function of the parameters of the model's forward: whether a call has the skeleton of the
    trace. It does not look at tensors, only where there are some."""
    parameters, defaults = _parameters(signature)
    names = {
        "at": at,
        "_pg_type": type,
        "_pg_more": more_attributes,
        "_pg_tensor": torch.Tensor,
        "_pg_torch": torch,
        **defaults,
    }
    skeleton = Skeleton(plan, signature, names)
    tests = [differs for differs, _ in (*skeleton.containers(), *skeleton.constants())]
    tests += [f"not isinstance({skeleton.access(i.path)}, _pg_tensor)" for i in plan.inputs]
    text = f"def fits({parameters}):\n    return not ({' or '.join(tests) or 'False'})"
    test: Callable[..., bool] = _made(text, "fits", skeleton.names)
    return test


class Skeleton:
    """What a call has besides the values of its tensors, as source over the parameters of the
    forward and `names`: pairs of a test for a difference, and what raises its error."""

    def __init__(self, plan: Plan, signature: inspect.Signature, names: dict[str, Any]) -> None:
        self.names = names
        self._plan = plan
        self._containers = [*plan.containers, *_empty(plan, signature)]
        self._keyed = {each.path for each in plan.containers if each.keys is not None}

    def access(self, path: Path) -> str:
        """The value at `path`; containers with keys or positions are asked for them."""
        text = str(path[0])
        for depth, step in enumerate(path[1:], 1):
            text = f"{text}[{step!r}]" if path[:depth] in self._keyed else f"at({text}, {step!r})"
        return text

    def containers(self) -> Iterator[tuple[str, str]]:
        for index, each in enumerate(self._containers):
            self.names[f"X{index}"], value = each, self.access(each.path)
            yield _differs(each, value), f"_pg_other(X{index}, {value})"

    def constants(self) -> Iterator[tuple[str, str]]:
        names = self.names
        for index, constant in enumerate(self._plan.constants):
            names[f"K{index}"], value = dotted(constant.path), self.access(constant.path)
            if constant.is_default:
                names[f"k{index}"] = names[f"default_{constant.path[0]}"]
            else:
                names[f"k{index}"] = decode(constant.value)
            differs = f"_pg_type({value}) is not _pg_type(k{index}) or {value} != k{index}"
            # 0.0 is not -0.0
            if isinstance(names[f"k{index}"], float | complex) and not names[f"k{index}"]:
                differs += f" or str({value}) != str(k{index})"
            if constant.is_default or names[f"k{index}"] is None:
                differs = f"{value} is not k{index}"
            yield differs, f"fixed(K{index}, k{index}, {value})"


Forms = dict[int, tuple[Callable[..., bool], tuple[int, ...]]]
"""For a number of tokens, a test for the form of inputs that were checked, and their sizes."""

_MOST_FORMS = 256


def _remember(
    forms: Forms, num_tokens: int, tensors: tuple[torch.Tensor, ...], sizes: tuple[int, ...]
) -> None:
    if len(forms) >= _MOST_FORMS:
        del forms[next(iter(forms))]
    if all(type(tensor) is torch.Tensor for tensor in tensors):
        forms[num_tokens] = form_test(tensors), sizes


def packer(plan: Plan) -> Pack:
    """A function of (results, input tensors) that returns what the model's forward would."""
    constants: dict[str, Any] = {}
    positions = {f"L.{item.label}": f"inputs[{index}]" for index, item in enumerate(plan.inputs)}

    def place(ref: Ref) -> str:
        return f"results[{ref[1:]}]" if ref.startswith("o") else positions[ref]

    text = source(decode(plan.structure), constants, place)
    pack: Pack = _made(f"def pack(results, inputs):\n    return {text}", "pack", constants)
    return pack


def passed_inputs(plan: Plan) -> frozenset[int]:
    """Positions of inputs that the model returns and does not write."""
    found = refs(decode(plan.structure))
    inputs = enumerate(plan.inputs)
    return frozenset(i for i, it in inputs if f"L.{it.label}" in found and not it.written)


def laid_out(plan: Plan) -> Callable[..., bool]:
    """Whether the plan's input tensors have the memory that compiled code relies on: the strides,
    and values that are not to be negated or conjugated when they are read."""
    tests = []
    for item in plan.inputs:
        strides = f"stride() == {item.stride!r}" if item.stride else "is_contiguous()"
        tests.append(f"{item.name}.{strides}")
        if item.dtype.startswith(("float", "bfloat", "complex")):
            tests.append(f"not {item.name}.is_neg()")
        if item.dtype.startswith("complex"):
            tests.append(f"not {item.name}.is_conj()")
    parameters = ", ".join(item.name for item in plan.inputs)
    text = f"def laid_out({parameters}):\n    return {' and '.join(tests) or 'True'}"
    test: Callable[..., bool] = _made(text, "laid_out", {})
    return test


def lay_out(item: UserInput, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, in the memory that compiled code relies on."""
    tensor = tensor.resolve_conj().resolve_neg()
    if not item.stride:
        return tensor.contiguous()
    if tensor.stride() == item.stride:
        return tensor
    copy = torch.empty_strided(tensor.shape, item.stride, dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _empty(plan: Plan, signature: inspect.Signature) -> list[Container]:
    """The `*args` and `**kwargs` that were empty in the trace."""
    known = {each.path for each in plan.containers}
    kinds = {Parameter.VAR_POSITIONAL: "tuple", Parameter.VAR_KEYWORD: "dict"}
    return [
        Container(path=(name,), kind=("builtins", kinds[parameter.kind]), keys=())
        for name, parameter in signature.parameters.items()
        if parameter.kind in kinds and (name,) not in known
    ]


def _differs(container: Container, value: str) -> str:
    """Whether `value` is another container, as source."""
    (module, name), keys = container.kind, container.keys
    if module == "builtins":
        test = f"_pg_type({value}) is not {name}"
    else:
        kind = f"_pg_type({value})"
        test = f"{kind}.__qualname__ != {name!r} or {kind}.__module__ != {module!r}"
    if isinstance(keys, int):
        return f"{test} or len({value}) != {keys}"
    if container.is_tensor and isinstance(keys, tuple):
        dtype, *sizes = keys
        fixed = [f"{value}.shape[{dim}] != {n}" for dim, n in enumerate(sizes) if type(n) is int]
        form = [f"{value}.dtype is not _pg_torch.{dtype}", f"{value}.dim() != {len(sizes)}"]
        return " or ".join([test, *form, *fixed])
    return f"{test} or _pg_more({value})" if keys is None else f"{test} or (*{value},) != {keys!r}"


def _other_container(expected: Container, value: Any) -> None:
    """Name the first thing that differs."""
    got = Container.of(expected.path, value).form
    if names := more_attributes(value):
        got += f" with another attribute {min(names)!r}"
    raise InputMismatch(name=dotted(expected.path), got=got, expected=expected.form)


def more_attributes(value: Any) -> set[str]:
    """Attributes of a dataclass that neither its class nor the code of its methods names."""
    kind: Any = type(value)
    return vars(value).keys() - _of_class(kind) if _has_fields(kind) else set()


@lru_cache
def _has_fields(kind: Any) -> bool:
    return is_dataclass(kind) and "__dict__" in dir(kind)


@lru_cache
def _of_class(kind: type) -> frozenset[str]:
    names = [*dir(kind), *(each.name for each in fields(kind))]
    methods = [each for base in kind.__mro__ for each in vars(base).values()]
    codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
    return frozenset(names).union(*(code.co_names for code in codes))


def at(value: Any, step: str | int) -> Any:
    """What `value` holds under a key or position, or as an attribute.

    A dataclass may have a `__getitem__` of its own.
    """
    if is_dataclass(value):
        return getattr(value, str(step))
    try:
        return value[step]
    except TypeError:  # a NamedTuple
        return getattr(value, str(step))


def _parameters(signature: inspect.Signature) -> tuple[str, dict[str, Any]]:
    """The signature as source with defaults replaced by names, and the defaults by name."""
    defaults = {}
    parameters = []
    for name, parameter in signature.parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            defaults[f"default_{name}"] = parameter.default
            parameter = parameter.replace(default=Verbatim(f"default_{name}"))
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
    text = str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))
    return text[1:-1], defaults


class Verbatim(str):
    """Prints as it is, also inside of a signature or an error."""

    __slots__ = ()
    __repr__ = str.__str__


def _made(text: str, name: str, names: dict[str, Any]) -> Any:
    namespace = dict(names)
    exec(compile(text, f"<piecegraph {name}>", "exec"), namespace)
    return namespace[name]


def _device_test(item: UserInput) -> str:
    if item.device == "cpu":
        return f"not {item.name}.is_cpu"
    return f"str({item.name}.device) != {item.device!r}"


def _is_plain(value: Any) -> bool:
    """Whether `value` is a tensor that is what its memory holds."""
    return has_plain_memory(value) and not has_own_operators(value)


def _mismatch(item: tuple[str, str], tensor: Any) -> None:
    name, expected = item
    got = type(tensor).__name__
    if has_plain_memory(tensor) and not _is_plain(tensor):
        got = f"a {got}, a class of tensors with operators of its own"
    elif isinstance(tensor, torch.Tensor) and not has_plain_memory(tensor):
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        kind = "fake or inside a transform" if layout == "strided" else layout
        got = f"a {got} without rows in memory ({kind})"
    elif isinstance(tensor, torch.Tensor):
        got = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
    raise InputMismatch(name=name, got=got, expected=expected)


def _form(item: UserInput, plan: Plan) -> str:
    """What the input must be, with the user's names for dynamic sizes."""
    labels = {symbol.name: symbol.label for symbol in plan.symbols}
    shape = _substituted(", ".join(map(str, item.shape)), labels)
    return f"torch.{item.dtype} ({shape}) on {item.device}"


def _fixed(name: str, traced: Any, value: Any) -> None:
    text = f"a tensor {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    if len(text) > 100:  # what holds tensors shows their numbers
        text = f"an object of class {type(value).__qualname__}"
    raise ArgumentFixed(name=name, value=text, traced=traced)


def _beyond(symbol: Symbol, size: int) -> None:
    low = _served_low(symbol)
    raise SizeOutOfRange(name=symbol.label, size=size, low=low, high=symbol.high)


def _served_low(symbol: Symbol) -> int:
    """The smallest size of a step: batches with fewer tokens than the code takes are padded."""
    return 1 if symbol.label == TOKENS else symbol.low


def _broken(check: GuardCheck, sizes: tuple[int, ...]) -> None:
    raise GuardBroken(where=check.where, expression=check.expression, sizes=sizes)


def _renamed(expression: str, plan: Plan) -> str:
    """A check's expression over the sizes of the generated function, padded where they are."""
    names = {
        symbol.label: f"max({symbol.name}, {symbol.low})"
        if symbol.low > _served_low(symbol)
        else symbol.name
        for symbol in plan.symbols
    }
    return _substituted(expression, names)


def _substituted(expression: str, names: dict[str, str]) -> str:
    return re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m[0], m[0]), expression)
