"""Whether a module that is called equals the module of a region in all that its trace can see."""

from __future__ import annotations

import types
from typing import Any

import torch

from .regions import CONTAINERS, PRIMITIVE, Name, Names, Region, metadata, text


class Match:
    """The comparison of a module that is called with the module of a region."""

    def __init__(self, names: Names, region: Region, module: Any, source: Any, tx: Any) -> None:
        self.source = source
        self.shared: list[tuple[Any, Any]] = []
        """Source and value of each object that both modules hold and that the region has read."""
        self._values: list[tuple[Any, Any]] = []
        self._names, self._region, self._module, self._tx = names, region, module, tx
        self._pairs: dict[int, Any] = {}
        self._paired: set[int] = set()
        self._placeholders: dict[torch.fx.Node, tuple[Any, Any]] = {}
        root = tx.output.root_tx
        self._scope = {"L": root.f_locals, "G": root.f_globals}

    def holds(self) -> bool:
        try:
            return self._holds()
        except Exception:  # such as a source that cannot be evaluated: the call is traced
            return False

    def _holds(self) -> bool:
        region = self._region
        return (
            region.is_now()
            and not any(node._erased for node in region.nodes)
            and self._same(region.module, self._module, region.name)
            and all(map(self._is_shared, region.elsewhere))
            and all(self._read_alike(*each) for each in region.own)
            and all(map(self._placed, region.outside))
        )

    def placeholder(self, node: torch.fx.Node) -> tuple[Any, torch.Tensor] | None:
        """Source and value of the tensor for a placeholder of the region; None for a size."""
        return self._placeholders.get(node)

    def reads(self) -> list[tuple[Any, Any, Any]]:
        """What the trace of the module would have read, as in `Region.reads`."""
        return [(self._moved(source), value, None) for source, value in self._values]

    def name(self, name: Name) -> Name:
        source = self._moved(name.source)
        moved = Name(self._value(source))
        moved.source = source
        return moved

    def _moved(self, source: Any) -> Any:
        old, new = self._region.source, self.source
        return source.clone(lambda each: new if each == old else each)

    def _value(self, source: Any) -> Any:
        return eval(text(source), {}, self._scope)

    def _value_moved(self, expression: str) -> Any:
        return eval(
            self._region.pattern.sub(lambda _: text(self.source), expression), {}, self._scope
        )

    def _same(self, one: Any, other: Any, path: str) -> bool:
        """Whether two values are equal in all that a trace can see."""
        if type(one) is not type(other):
            return False
        is_value = type(one) in PRIMITIVE
        may_differ = type(one) is str and self._is_passed(path)
        if is_value and repr(one) != repr(other) and not may_differ:
            return False
        if isinstance(one, (torch.nn.Module, torch.Tensor, *CONTAINERS, *PRIMITIVE)):
            if id(one) in self._pairs or id(other) in self._paired:
                return self._pairs.get(id(one)) is other
            self._pairs[id(one)] = other
            self._paired.add(id(other))
        if is_value:
            return True
        is_known = one is not other and other in self._tx.output.side_effects
        if is_known and isinstance(one, (torch.Tensor, list, dict, set)):
            return False  # another part of the model reads it too
        if isinstance(one, torch.nn.Module):
            return self._same_modules(one, other, path)
        if isinstance(one, torch.Tensor):
            return metadata(one) == metadata(other) and self._same(vars(one), vars(other), path)
        if type(one) in (list, tuple):
            return len(one) == len(other) and all(
                self._same(a, b, f"{path}[{i}]")
                for i, (a, b) in enumerate(zip(one, other, strict=True))
            )
        if type(one) in (dict, set, frozenset):
            alike = [*map(repr, one)] == [*map(repr, other)]
            if not alike or any(type(each) not in PRIMITIVE for each in one):
                return False
            return type(one) is not dict or all(
                self._same(one[key], other[key], f"{path}[{key!r}]") for key in one
            )
        return one is other

    def _same_modules(self, one: Any, other: Any, path: str) -> bool:
        ours, theirs = vars(one), vars(other)
        if [*ours] != [*theirs]:
            return False
        for key, value in ours.items():
            inside = f"{path}.{key}"
            if key.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")):
                if value or theirs[key]:
                    return False
            elif not self._same(value, theirs[key], inside):
                return False
        return True

    def _is_passed(self, path: str) -> bool:
        return path in self._names.passed and path not in self._names.inspected

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
        return own and (id(value) in self._pairs or id(value) not in self._paired)

    def _placed(self, node: torch.fx.Node) -> bool:
        """Find what stands for a placeholder: of the module, if the region's is of its module."""
        source = getattr(node.meta.get("grapharg"), "source", None)
        if isinstance(node.meta.get("example_value"), torch.SymInt):
            return source is None or not self._region.holds(source)
        if source is None:
            return False
        value = self._value(source)
        if not self._region.holds(source):
            places = (own for _, own, held, _ in self._region.own if held is value)
            source = next(places, source)
        moved = self._moved(source)
        self._placeholders[node] = moved, self._value(moved)
        return isinstance(value, torch.Tensor)
