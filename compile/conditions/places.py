"""Places: where a value is reached from, as data that another process can follow.

A place is a root and steps from there. The root is the model, the globals of its forward, the
custom ops, or a module by name. A step is an attribute, as a string, or a list `[kind, argument]`:

    item         `value[argument]`
    held         `argument`, if it is a key of a dict or in a set
    value, key   the value or the key at a position of a dict
    type         `type(value)`
    static       an attribute of a class as its bases give it, without calling descriptors
    call         the referent of a weak reference
    tensor       the tensor with the memory of a numpy array

Following a place evaluates nothing that is stored: it is attribute access and indexing alone.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...torch_compat.basics.modules import called_function

Step: TypeAlias = "str | list[Any]"
MODEL, GLOBALS, OPS = "", "*", "::"
"""Roots that are no modules: the model, the globals of its forward, the custom ops."""

CONTAINERS = ("_modules", "_parameters", "_buffers")

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
GLOBAL_HOOKS = tuple(f"_global{name}" for name in HOOKS)
"""Dicts of hooks that a call of every module runs, in the module that defines `nn.Module`."""
HOOK_TABLES = (*HOOKS, *GLOBAL_HOOKS)
"""Beginnings of the names of dicts of hooks, keyed by numbers that differ from run to run."""


MISSING: Any = object()
"""There is nothing at a place."""


@dataclass(frozen=True)
class Place:
    """Where a value is found: a root, the steps from there, and how a person would write it."""

    root: str
    steps: tuple[Step, ...]
    name: str


def root_value(root: str, model: torch.nn.Module) -> Any:
    """The object at a root. A module that the model has not imported yet is imported."""
    if root == MODEL:
        return model
    if root == GLOBALS:
        return called_function(model).__globals__
    if root == OPS:
        return torch.ops
    if (module := sys.modules.get(root)) is not None:
        return module
    try:
        return importlib.import_module(root)
    except Exception:  # the module's own code may raise anything
        return MISSING


def reader(root: str, steps: Sequence[Step], model: torch.nn.Module) -> Callable[[], Any]:
    """A function that returns what is at a place now; MISSING if there is nothing."""
    start = root_value(root, model)

    def read() -> Any:
        value = start
        for step in steps:
            value = follow(value, step)
        return value

    return read


def follow(value: Any, step: Step) -> Any:
    """The value one step further; MISSING if there is none."""
    if value is MISSING:
        return MISSING
    try:
        if isinstance(step, str):
            return getattr(value, step)
        kind, argument = step
        match kind:
            case "item":
                return value[key_of(argument)]
            case "held":
                return key if (key := key_of(argument)) in value else MISSING
            case "value":
                return next(itertools.islice(value.values(), argument, None), MISSING)
            case "key":
                return next(itertools.islice(value, argument, None), MISSING)
            case "type":
                return type(value)
            case "static":
                return inspect.getattr_static(value, argument)
            case "call":
                return value()
            case "tensor":
                return torch.as_tensor(value, device="cpu")
    except Exception:  # a property of the user's may raise anything
        return MISSING
    return MISSING


def encoded_key(key: Any) -> Any:
    """A key of a dict or sequence as JSON; raises TypeError for a kind that cannot be stored."""
    if key is None or isinstance(key, bool | int | str):
        return key
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, tuple):
        return {"tuple": [encoded_key(each) for each in key]}
    if isinstance(key, type) and _class_at(key.__module__, key.__qualname__) is key:
        return {"class": [key.__module__, key.__qualname__]}
    raise TypeError(f"a {type(key).__name__} as a key")


def key_of(encoded: Any) -> Any:
    if isinstance(encoded, dict):
        if "bytes" in encoded:
            return bytes.fromhex(encoded["bytes"])
        if "class" in encoded:
            return _class_at(*encoded["class"])
        return tuple(map(key_of, encoded["tuple"]))
    return encoded


def _class_at(module: str, qualname: str) -> Any:
    value: Any = sys.modules.get(module, MISSING)
    for name in qualname.split("."):
        value = getattr(value, name, MISSING)
    return value


def spelled(root: str, steps: Iterable[Step], model: torch.nn.Module) -> str:
    """A place as a person would write it: `model.layers.0.act.__self__.k`."""
    if root == OPS:
        return f"op {'::'.join(map(str, steps))}"
    named = {MODEL: "model", GLOBALS: str(called_function(model).__module__)}
    name, above = named.get(root, root), None
    for step in steps:
        if step not in CONTAINERS:
            is_global = step[0] == "item" and root == GLOBALS and "." not in name
            is_name = above in CONTAINERS or is_global
            name = _spelled_step(name, step, is_name)
        above = step
    return name


def _spelled_step(name: str, step: Step, is_name: bool) -> str:
    """`name` and one step more; `is_name` says that the key of an item is written as a name."""
    kind, argument = ("static", step) if isinstance(step, str) else step
    if kind == "type":
        return f"type({name})"
    if kind == "call":
        return f"{name}()"
    if kind == "tensor":
        return f"torch.as_tensor({name})"
    if kind == "static" or is_name:
        return f"{name}.{argument}"
    return f"{name}[{key_of(argument)!r}]" if kind == "item" else f"{name}[{kind} {argument}]"


def called_as(model: torch.nn.Module) -> str:
    """The attribute of the model that leads to its `called_function`."""
    return "__call__" if called_function(model) is type(model).__call__ else "forward"
