"""Whether a module that is called equals the module of a region in all that its trace can see."""

from __future__ import annotations

import dataclasses
import functools
import types
from abc import ABCMeta
from typing import Any

import torch
from torch._guards import ChainedSource, Source

from .passed_values import is_made, text
from .reachable import CONTAINERS, PRIMITIVE, is_python_class
from .regions import Region, metadata, pattern_of

_HOOKS = "_hooks", "_hooks_with_kwargs", "_hooks_always_called"
_FUNCTION = "__defaults__", "__kwdefaults__", "__closure__", "__dict__"
_MARK = "_dynamo_static_input_type"
_INSIDE = (torch.nn.Module, torch.Tensor, *CONTAINERS)


class Match:
    """The comparison of a module that is called with the module of a region."""

    def __init__(self, region: Region, module: Any, source: Any, tx: Any) -> None:
        self.source = source
        self.shared: list[tuple[Any, Any]] = []
        """Source and value of each object that both modules hold and that the region has read."""
        self.to_mark: list[torch.Tensor] = []
        """Tensors that Dynamo would mark when it reads them."""
        self._values: list[tuple[Any, Any]] = []
        self._names, self._region, self._module, self._tx = region.names, region, module, tx
        self.reason = ""
        """What differs first."""
        self._pairs: dict[int, Any] = {}
        self._paired: set[int] = set()
        self._placeholders: dict[torch.fx.Node, tuple[Any, Any]] = {}
        self._made: dict[torch.fx.Node, tuple[Any, ...]] = {}
        root = tx.output.root_tx
        self._scope = {"L": root.f_locals, "G": root.f_globals, "module": module}
        self._sources = {region.source: source}
        """By source of the region, the one for the module."""

    def holds(self) -> bool:
        try:
            return self._holds()
        except Exception as error:  # such as a source that cannot be evaluated: the call is traced
            self.reason = self.reason or f"{type(error).__name__}: {error}"
            return False

    def _holds(self) -> bool:
        region = self._region
        if not region.is_now() or any(node._erased for node in region.nodes):
            return self._differ(region.name, "modes or attributes were changed since")
        return (
            self._is_called_by_source()
            and self._same(region.module, self._module, region.name)
            and all(map(self._is_shared, region.elsewhere.values()))
            and all(self._read_alike(*each) for each in region.own)
            and all(map(self._placed, region.outside))
        )

    def _is_called_by_source(self) -> bool:
        is_found = self._value(self.source) is self._module
        return is_found or self._differ(text(self.source), "leads to another object")

    def placeholder(self, node: torch.fx.Node) -> tuple[Any, torch.Tensor] | None:
        """Source and value of the tensor for a placeholder of the region; None for a size."""
        return self._placeholders.get(node)

    def made(self, node: torch.fx.Node) -> tuple[Any, ...] | None:
        """Class, arguments and their sources of the object for a placeholder that is one."""
        if node not in self._made:
            return None
        kind, args, sources = self._made[node]
        return kind, args, tuple(each and self._passed(each) for each in sources)

    def reads(self) -> list[tuple[Any, Any, Any]]:
        """What the trace of the module would have read, as in `Region.reads`."""
        own = [(self._moved(source), value, None) for source, value in self._values]
        return [*own, *self._region.beyond]

    def opened(self) -> list[Any]:
        """Objects whose `__dict__` the trace of the module would have opened."""
        return [self._pairs.get(id(each), each) for each in self._region.opened]

    def passed(self, value: Any) -> Any:
        """What the trace of the module would have passed for a `Name` or `Number`."""
        source = self._passed(value.source)
        moved = type(value)(self._value_moved(text(value.source)))
        moved.source = source
        return moved

    def _passed(self, source: Any) -> Any:
        """Where the module has what the region passed to an operator."""
        moved = self._moved(source)
        self._names.passed.add(text(moved))
        if text(source) in self._names.inspected:
            self._names.inspected.add(text(moved))
        return moved

    def _moved(self, source: Any) -> Any:
        """As `source.clone`, once for each part."""
        known = self._sources.get(source)
        if known is None and not isinstance(source, ChainedSource):
            return source
        if known is None:
            parts = {each.name: getattr(source, each.name) for each in dataclasses.fields(source)}
            inside = {name: part for name, part in parts.items() if isinstance(part, Source)}
            moved = {name: self._moved(part) for name, part in inside.items()}
            changed = any(moved[name] is not part for name, part in inside.items())
            known = dataclasses.replace(source, **moved) if changed else source
            self._sources[source] = known
        return known

    def _value(self, source: Any) -> Any:
        return eval(text(source), {}, self._scope)

    def _value_moved(self, expression: str) -> Any:
        return eval(self._region.code(expression), {}, self._scope)

    def _same(self, one: Any, other: Any, path: str) -> bool:
        """Whether two values are equal in all that a trace can see."""
        if type(one) is not type(other):
            return self._differ(path, f"{_brief(one)} and {_brief(other)}")
        is_value = type(one) in PRIMITIVE
        if is_value and repr(one) != repr(other):
            if not self._is_passed(path):
                return self._differ(path, f"{_brief(one)} and {_brief(other)}")
            if type(one) is int:  # equal numbers are often one object
                return True
        if id(one) in self._pairs or id(other) in self._paired:
            is_pair = self._pairs.get(id(one)) is other
            return is_pair or self._differ(path, "objects are shared in another way")
        self._pairs[id(one)] = other
        self._paired.add(id(other))
        if is_value or (one is other and not isinstance(one, _INSIDE)):
            return True
        if one is not other and self._is_read_elsewhere(one, other):
            return self._differ(path, "another part of the model reads it too")
        return self._same_content(one, other, path)

    def _same_content(self, one: Any, other: Any, path: str) -> bool:
        if isinstance(one, torch.nn.Module):
            return self._same_attributes(one, other, path)
        if isinstance(one, torch.Tensor):
            alike = metadata(one) == metadata(other) or self._differ(path, "tensors of other forms")
            return alike and self._same_marks(one, other, path)
        if type(one) in (list, tuple):
            alike = len(one) == len(other) or self._differ(path, "other lengths")
            return alike and all(
                self._same(a, b, f"{path}[{i}]")
                for i, (a, b) in enumerate(zip(one, other, strict=True))
            )
        if type(one) in (dict, set, frozenset):
            alike = [*map(repr, one)] == [*map(repr, other)]
            if not alike or any(type(each) not in PRIMITIVE for each in one):
                return self._differ(path, "other keys or items")
            return type(one) is not dict or all(
                self._same(one[key], other[key], f"{path}[{key!r}]") for key in one
            )
        if isinstance(one, types.FunctionType):
            return self._same_functions(one, other, path)
        ours, theirs = _parts(one), _parts(other)
        if ours is None or theirs is None or [*ours] != [*theirs]:
            return self._differ(path, f"two objects of {type(one).__name__}")
        if ours.keys() == {"__dict__"}:
            return self._same_attributes(one, other, path)
        return all(self._same(ours[name], theirs[name], f"{path}.{name}") for name in ours)

    def _same_marks(self, one: torch.Tensor, other: torch.Tensor, path: str) -> bool:
        """Whether the attributes of two tensors are equal once Dynamo has marked what it reads."""
        ours, theirs = vars(one), vars(other)
        marked = [*ours] == [*theirs, _MARK] and ours[_MARK] == "unguarded"
        if not (marked and self._is_marked_by_reading(one)):
            return self._same(ours, theirs, path)
        self.to_mark.append(other)
        return all(self._same(ours[name], theirs[name], f"{path}.{name}") for name in theirs)

    def _is_marked_by_reading(self, tensor: torch.Tensor) -> bool:
        """Whether Dynamo marks what stands for `tensor` before anything can look at the mark."""
        return not self._region.unseen and any(
            value is tensor and source.guard_source.is_unspecialized_nn_module()
            for _, source, value, _ in self._region.own
        )

    def _same_functions(self, one: Any, other: Any, path: str) -> bool:
        """Whether two functions run the same code on equal values."""
        if one.__code__ is not other.__code__ or one.__globals__ is not other.__globals__:
            return self._differ(path, "two functions")
        compiled = "_torchdynamo_inline"  # what Dynamo traces of a function of `torch.compile`
        is_compiled = hasattr(one, compiled) and hasattr(other, compiled)
        names = (compiled,) if is_compiled else _FUNCTION
        return all(
            self._same(getattr(one, name), getattr(other, name), f"{path}.{name}") for name in names
        )

    def _same_attributes(self, one: Any, other: Any, path: str) -> bool:
        ours, theirs = vars(one), vars(other)
        if [*ours] != [*theirs]:
            return self._differ(path, "other attributes")
        may_have_hooks = isinstance(one, torch.nn.Module)
        for key, value in ours.items():
            inside = f"{path}.{key}"
            if may_have_hooks and key.endswith(_HOOKS):
                if value or theirs[key]:
                    return self._differ(path, "hooks")
            elif self._is_never_read(one, value, theirs[key]):
                continue
            elif not self._same(value, theirs[key], inside):
                return False
        return True

    def _is_never_read(self, owner: Any, one: Any, other: Any) -> bool:
        """Whether attributes may differ, since all reads of them are compared."""
        region, kinds = self._region, {type(one), type(other)}
        is_known = not region.unseen and all(each is not owner for each in region.opened)
        return kinds in ({int}, {str}) and one != other and is_known

    def _is_read_elsewhere(self, one: Any, other: Any) -> bool:
        """Whether what is in no module has read an object, such as to compare it with others."""
        if isinstance(one, (torch.nn.Module, tuple, frozenset)):
            return False
        effects = self._tx.output.side_effects
        if isinstance(one, (torch.Tensor, list, dict, set)):
            return other in effects
        if isinstance(one, types.CellType) and one in effects:
            source = getattr(effects[one].pre_existing_contents, "source", None)
            return other in effects or source is None or not self._region.holds(source)
        reads, below = self._region.all_reads.of, pattern_of(self.source)
        return not (
            all(map(self._region.holds, reads(one)))
            and all(below.search(text(source)) for source in reads(other))
        )

    def _differ(self, path: str, what: str) -> bool:
        self.reason = self.reason or f"{path}: {what}"
        return False

    def _is_passed(self, path: str) -> bool:
        names = self._names
        return path in names.passed and path not in names.inspected and not self._region.unseen

    def _read_alike(self, expression: str, source: Any, value: Any, built: bool) -> bool:
        """Whether what the region read is equal where the module would read it."""
        other = self._value_moved(expression)
        self._values.append((source, other))
        is_shared = other is value and self._module is not self._region.module
        if is_shared and built and other in self._tx.output.side_effects:
            self.shared.append((self._moved(source), other))
        if isinstance(value, (torch.nn.Module, torch.Tensor)):
            return self._pairs.get(id(value), value) is other
        if isinstance(value, types.MethodType) and isinstance(other, types.MethodType):
            owner = value.__self__
            own = self._pairs.get(id(owner), owner) is other.__self__
            return own and value.__func__ is other.__func__
        is_itself = value is other and self._pairs.get(id(value), value) is value
        return is_itself or self._same(value, other, expression)

    def _is_shared(self, value: Any) -> bool:
        """Whether what another part of the model reads too has the same place in both modules."""
        own = self._pairs.get(id(value), value) is value
        is_shared = own and (id(value) in self._pairs or id(value) not in self._paired)
        return is_shared or self._differ(_brief(value), "another part of the model has it too")

    def _placed(self, node: torch.fx.Node) -> bool:
        """Find what stands for a placeholder: of the module, if the region's is of its module."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if is_made(node):
            kind, args, sources = self._tx.output.synthetic_source_ctor_info[source]
            values = (
                arg if each is None else self._value(self._moved(each))
                for arg, each in zip(args, sources, strict=True)
            )
            self._made[node] = kind, (*values,), sources
            return True
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            return source is None or not self._region.holds(source)
        if source is None:
            return False
        value = self._value(source)
        if not self._region.holds(source):
            places = (own for _, own, held, _ in self._region.own if held is value)
            source = next(places, source)
        self._placeholders[node] = self._moved(source), self._value_moved(text(source))
        return isinstance(value, torch.Tensor)


def _parts(value: Any) -> dict[str, Any] | None:
    """All that an object holds, by name; None where it may hold more."""
    kind = type(value)
    if kind is functools.partial:
        return {**_named(value, "func", "args", "keywords"), "__dict__": vars(value)}
    if kind is types.MethodType:
        return _named(value, "__func__", "__self__")
    if kind is types.CellType:
        return {"cell_contents": value.cell_contents}
    if type(kind) not in (type, ABCMeta) or not is_python_class(kind):
        return None  # such as a type that is opaque to torch, which calls its methods
    slots = {
        name: slot.__get__(value, kind)
        for each in kind.__mro__
        for name, slot in vars(each).items()
        if isinstance(slot, types.MemberDescriptorType) and hasattr(value, name)
    }
    return slots | ({"__dict__": vars(value)} if kind.__dictoffset__ else {})


def _named(value: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _brief(value: Any) -> str:
    shown = repr(value) if type(value) in PRIMITIVE else type(value).__name__
    return shown if len(shown) < 60 else f"{shown[:60]}…"
