"""Whether a module that is called equals the module of a region in all that its trace can see.

Objects of the two are paired one to one, so that comparisons of identity have the same results.
What is not compared by what it holds is the same object. An integer or a string that is an
attribute of a module may differ if no read shows it.
"""

from __future__ import annotations

import functools
import types
from abc import ABCMeta
from collections.abc import Mapping
from typing import Any

import torch
from torch._guards import Source

from .names import Names, is_label, text
from .reachable import CONTAINERS, PRIMITIVE, is_python_class
from .region import Region, metadata, pattern_of

_COMPARED = (torch.nn.Module, torch.Tensor, *CONTAINERS)
"""Of what both modules hold, the contents of these are paired too."""
_READ_MARK = "_dynamo_static_input_type", "unguarded"
"""What Dynamo puts on a tensor that it reads."""


class Match:
    """The comparison of a module that is called with the module of a region."""

    def __init__(
        self,
        region: Region,
        module: torch.nn.Module,
        source: Any,
        tx: Any,
        names: Names,
        reads: Mapping[int, list[Any]],
    ) -> None:
        self.source = source
        self.shared: list[tuple[Any, Any]] = []
        """Source and value of each object that both modules hold and that the region has read."""
        self.inputs: dict[torch.fx.Node, tuple[Any, ...]] = {}
        """For each input of the region: (source, value) of a tensor, or (class, arguments, sources)
        of an object that Dynamo's code makes."""
        self._region, self._module, self._tx = region, module, tx
        self._names, self._reads = names, reads
        self._pairs: dict[int, tuple[Any, Any]] = {}
        self._partners: set[int] = set()
        root = tx.output.root_tx
        self._scope = {"L": root.f_locals, "G": root.f_globals, "module": module}

    def difference(self) -> str | None:
        """Why the region may not be copied for the module, if so."""
        region = self._region
        if not region.is_current():
            return "modes or attributes were changed since"
        if self._value(text(self.source)) is not self._module:
            return f"{text(self.source)} leads to another object"
        if (difference := self._difference(region.module, self._module, region.name)) is not None:
            return difference
        for value in region.shared.values():
            is_alone = id(value) in self._pairs or id(value) not in self._partners
            if self._partner(value) is not value or not is_alone:
                return f"{_brief(value)}: another part of the model has it too"
        for expression, source, value, became_variable in region.reads_below:
            try:
                other = self._moved_value(expression)
            except Exception as error:  # of the model's own code, such as a property
                return f"{expression}: {type(error).__name__}"
            if (difference := self._read_difference(expression, value, other)) is not None:
                return difference
            is_shared = other is value and self._module is not region.module
            if is_shared and became_variable and other in self._tx.output.side_effects:
                self.shared.append((self.moved(source), other))
        return next(filter(None, map(self._input_difference, region.inputs)), None)

    def moved(self, source: Any) -> Any:
        """The source for the module that corresponds to one of the region."""
        if not isinstance(source, Source):
            return source
        origin = self._region.source
        return source.clone(lambda part: self.source if part == origin else part)

    def name_for(self, name: Any) -> str:
        """What the trace of the module would have passed for a name."""
        return str(self._moved_value(text(name.source)))

    def _value(self, expression: str) -> Any:
        return eval(expression, {}, self._scope)

    def _moved_value(self, expression: str) -> Any:
        return eval(self._region.code(expression), {}, self._scope)

    def _partner(self, value: Any) -> Any:
        """What stands for an object of the region's module."""
        return self._pairs.get(id(value), (value, value))[1]

    def _difference(self, one: Any, other: Any, path: str) -> str | None:
        """The first difference in all that can be reached from two values."""
        is_primitive = type(one) in PRIMITIVE
        if type(one) is not type(other) or (is_primitive and repr(one) != repr(other)):
            return f"{path}: {_brief(one)} and {_brief(other)}"
        if id(one) in self._pairs or id(other) in self._partners:
            is_pair = id(one) in self._pairs and self._partner(one) is other
            return None if is_pair else f"{path}: objects are shared in another way"
        self._pairs[id(one)] = one, other
        self._partners.add(id(other))
        if is_primitive or (one is other and not isinstance(one, _COMPARED)):
            return None
        if one is not other and self._is_read_elsewhere(one, other):
            return f"{path}: another part of the model reads it too"
        if isinstance(one, torch.Tensor) and metadata(one) != metadata(other):
            return f"{path}: tensors of different forms"
        ours, theirs = _contents(one), _contents(other)
        if ours is None or theirs is None or [*map(repr, ours)] != [*map(repr, theirs)]:
            return f"{path}: two objects of {type(one).__name__}"
        for key, value in ours.items():
            may_differ = isinstance(one, torch.nn.Module) and type(value) in (int, str)
            if may_differ and type(theirs[key]) is type(value) and theirs[key] != value:
                continue  # the reads are compared
            difference = self._difference(value, theirs[key], f"{path}.{key}")
            if difference is not None:
                return difference
        return None

    def _is_read_elsewhere(self, one: Any, other: Any) -> bool:
        """Whether the rest of the model has read an object, such as to compare it with others."""
        if isinstance(one, (torch.nn.Module, tuple, frozenset)):
            return False
        below = pattern_of(self.source)
        return not (
            all(map(self._region.holds, self._reads.get(id(one), ())))
            and all(below.search(text(source)) for source in self._reads.get(id(other), ()))
        )

    def _read_difference(self, expression: str, value: Any, other: Any) -> str | None:
        """How what the region read differs from what the module would read."""
        names, path = self._names, f"read of {expression}"
        if type(value) is str and type(other) is str and value != other:
            is_only_passed = expression in names.passed and expression not in names.inspected
            return None if is_only_passed else f"{path}: {_brief(value)} and {_brief(other)}"
        if isinstance(value, (torch.nn.Module, torch.Tensor)) or value is other:
            return None if self._partner(value) is other else f"{path}: another object"
        return self._difference(value, other, path)

    def _input_difference(self, node: torch.fx.Node) -> str | None:
        """Find what stands for a placeholder of the region."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if is_label(node):
            kind, args, sources = self._tx.output.synthetic_source_ctor_info[source]
            moved = (*map(self.moved, sources),)
            values = (
                arg if source is None else self._value(text(source))
                for arg, source in zip(args, moved, strict=True)
            )
            self.inputs[node] = kind, (*values,), moved
            return None
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            is_own = source is not None and self._region.holds(source)
            return f"{node.name}: a size of the module" if is_own else None
        value = None if source is None else self._value(text(source))
        if not isinstance(value, torch.Tensor):
            return f"{node.name}: not a tensor"
        self.inputs[node] = self.moved(source), self._moved_value(text(source))
        return None


def _contents(value: Any) -> dict[Any, Any] | None:
    """What an object holds, by name or position; None if it may hold more."""
    kind = type(value)
    if kind in (list, tuple):
        return dict(enumerate(value))
    if kind in (dict, set, frozenset):
        items = value if kind is dict else {repr(item): item for item in value}
        return items if all(type(item) in PRIMITIVE for item in value) else None
    if isinstance(value, torch.Tensor):
        return {name: held for name, held in vars(value).items() if (name, held) != _READ_MARK}
    if kind is functools.partial:
        return {"func": value.func, "args": value.args, "keywords": value.keywords, **vars(value)}
    if kind is types.MethodType:
        return {"__func__": value.__func__, "__self__": value.__self__}
    if kind is types.FunctionType and hasattr(value, "_torchdynamo_inline"):
        return {"_torchdynamo_inline": value._torchdynamo_inline}  # of `torch.compile`
    if type(kind) not in (type, ABCMeta) or not is_python_class(kind):
        return None  # such as a type that is opaque to torch, which calls its methods
    state = object.__getstate__(value)
    attributes, slots = state if type(state) is tuple else (state, None)
    is_module = isinstance(value, torch.nn.Module)
    return (slots or {}) | {
        name: held
        for name, held in (attributes or {}).items()
        if not (is_module and "_hooks" in name and not held)
    }


def _brief(value: Any) -> str:
    shown = repr(value) if type(value) in PRIMITIVE else type(value).__name__
    return shown if len(shown) < 60 else f"{shown[:60]}…"
