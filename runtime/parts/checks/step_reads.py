"""What Python reads of a step while a graph is captured: the graph has that for good.

During a capture the forward context is observed: what is read of the metadata, the decision and the
layers is noted by its path, with its class; also what is found to be missing. Each step of the
graph compares its own with it. Of tensors the class is compared here and the memory in
`address_checks`. Attributes of modules are the model's, as globals of its code are: a graph has
those of its capture.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from types import BuiltinMethodType, MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor, TypedStorage, UntypedStorage
from torch.overrides import TorchFunctionMode

from ....compile.ir.ops import tensors_in
from ....errors import ReadNotKept, StaleContext
from ....torch_compat.basics.tensors import storage_id, tree_flatten, tree_unflatten
from ...capture.recorder import Kept
from ...core.binding import Verbatim
from ...forward_context import CURRENT, ForwardContext
from .exchanged import Exchanged, Facts
from .observer import Observer, is_value
from .observer import __file__ as _OBSERVER

_OURS = (__file__, _OBSERVER, Mapping.get.__code__.co_filename, torch.overrides.__file__)
"""Files whose functions stand between who reads and what notes it."""

STEPS_WITH_ALL = 3
ALL_EVERY = 64

FACTS = "num_tokens, decision, metadata, layers"


def reader(expressions: Iterable[str], names: Mapping[str, Any]) -> Callable[..., tuple[Any, ...]]:
    """A function of the facts of a step to the values of expressions: one frame a step."""
    items = "".join(f"{each}, " for each in expressions)
    read: Callable[..., tuple[Any, ...]] = eval(f"lambda {FACTS}: ({items})", dict(names))
    return read


def facts_of(context: ForwardContext) -> tuple[Any, ...]:
    """The facts of a step, which paths begin with."""
    return context.num_tokens, context.decision, context.metadata, context.layers


class StepReads:
    """What one capture read, by path, such as `metadata.scale`. See `observer.Noting`.

    A class of metadata may name fields in `graph_constants`: their value at the capture serves
    every step. And in `graph_bounds`: a step may have less than the capture, not more.
    """

    def __init__(
        self, kept: Kept | None = None, exchange: Callable[[], Exchanged] | None = None
    ) -> None:
        """`exchange` makes what observes the model, if breaks may read what graphs leave on it."""
        self.kept = kept or Kept()
        self._exchange = exchange
        self._exchanged: Exchanged | None = None
        self.of_model: Facts = {}
        self._clear()

    def _clear(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        """The tensors that were read, until the graph is in use."""
        self.names: dict[str, Any] = {}
        """What paths refer to beside the facts of a step: keys of dicts."""
        self._each, self._seldom = _Read(), _Read()
        """What each step compares; and what is held by modules and classes."""
        self.rarely = False
        self.gradient = False
        """Whether `requires_grad` was read, of which a graph's own inputs have none."""
        self._steps = 0
        self._bounds: dict[str, tuple[str, Any]] = {}
        """Of a comparison the path that is compared, and its bound."""
        self._objects: dict[str, Any] = {}
        """Of an identity the object: while it lives no other has its identity."""
        self._places: dict[str, tuple[str, str]] = {}
        """By path: file:line and name of the function that reads it."""
        self._refused: ReadNotKept | None = None
        self._observer: Observer | None = None

    def __bool__(self) -> bool:
        return bool(self._places) or self.gradient

    def facts(self) -> dict[str, str]:
        """By path: the value or the class, and where it was read."""
        read: dict[str, Any] = {}
        for each in (self._each, self._seldom):
            read |= each.values | {path: kind.__qualname__ for path, kind in each.classes.items()}
        return {path: f"{value!r} at {self._places[path][0]}" for path, value in read.items()}

    def watch(self, context: ForwardContext) -> None:
        """Observe what is read of `context`, between `open` and `close`."""
        self._clear()
        self._observer = Observer(context, self, self.kept.whole)

    def open(self) -> None:
        if self._exchange is not None and not self.kept.has_regions:
            self._exchanged = self._exchanged or self._exchange()
            self._exchanged.open()
        if self._observer is not None:
            self._observer.open()

    def border(self, weak: Callable[[Any], Any]) -> Callable[[], None] | None:
        """See `Exchanged.border`."""
        return self._exchanged.border(weak) if self._exchanged is not None else None

    def reads(self, addressed: set[int]) -> AbstractContextManager[Any]:
        """Entered around what is watched: notes what is read of tensors."""
        observer = self._observer
        return TensorReads(observer, addressed, self) if observer is not None else nullcontext()

    def of_step(self, args: Any) -> Callable[[], Any] | None:
        """What gives the arguments of a break in the step that runs, None if they are `args`: an
        object or tensor of the context is that of the step."""
        leaves, spec = tree_flatten(args)
        known = self._observer.paths() if self._observer is not None else {}
        paths = {at: known[id(leaf)] for at, leaf in enumerate(leaves) if id(leaf) in known}
        if not paths:
            return None
        read = reader([path or "None" for path in paths.values()], self.names)

        def arguments() -> Any:
            context = CURRENT.get()
            now = dict(zip(paths, read(*facts_of(context)), strict=True))
            now |= {at: context for at, path in paths.items() if not path}
            return tree_unflatten([now.get(at, leaf) for at, leaf in enumerate(leaves)], spec)

        return arguments

    def close(self) -> None:
        """Raises ReadNotKept and NotReplayed, also if the op that read has gone on."""
        if self._exchanged is not None:
            self._exchanged.close()
        if self._observer is not None:
            self._observer.close()
        if self._refused is not None:
            raise self._refused

    def finish(self) -> None:
        """The capture has ended: hold nothing of what was read but what is compared."""
        if self._exchanged is not None:
            self._exchanged.finish()
            self.of_model |= self._exchanged.facts
            self._exchanged = None
        if self._observer is not None:
            self._observer.close()
            self._observer.forget()
            self._observer = None

    def value(self, path: str, value: Any) -> None:
        if self._is_new(path):
            read = self._seldom if self.rarely else self._each
            if not isinstance(value, float) or value == value:
                read.values[path] = value
            if not _is_exact(value):
                self._places[text := f"repr({path})"] = self._places[path]
                read.values[text] = repr(value)

    def form(self, path: str, value: Any) -> None:
        if self._is_new(path):
            (self._seldom if self.rarely else self._each).classes[path] = type(value)
            if isinstance(value, Tensor):
                self.tensors[path] = value
            if not is_value(type(value)):
                self._seldom.apart.append(path)

    def identity(self, path: str, value: Any) -> None:
        self._objects[f"id({path})"] = value
        self.value(f"id({path})", id(value))

    def changes_itself(self, path: str) -> None:
        for each in (path, f"repr({path})"):
            self._seldom.values.pop(each, None)
        self._seldom.classes.pop(path, None)
        self._seldom.apart = [each for each in self._seldom.apart if each != path]

    def refuse(self, path: str, reason: str) -> NoReturn:
        self._is_new(path)
        where, reader = self._places[path]
        self._refused = ReadNotKept(where=where, reader=reader, fact=path, reason=reason)
        raise self._refused

    def bound(self, path: str, value: Any) -> None:
        test = f"bool({path} <= {self.key(value)})"
        self._bounds[test] = path, value
        self.value(test, True)

    def key(self, key: Any) -> str:
        if isinstance(key, str | int | None) and not isinstance(key, Enum):
            return repr(key)
        known = next((name for name, each in self.names.items() if each is key), None)
        name = known or f"key{len(self.names)}"
        self.names[name] = key
        return name

    def check(self, context: ForwardContext, tensors: Sequence[Tensor] = ()) -> None:
        """Compare a step's. Raises StaleContext for what the graph has another of."""
        facts = facts_of(context)
        if self.gradient and any(tensor.requires_grad for tensor in tensors):
            fact = "requires_grad of an input"
            raise StaleContext(reader="Python", fact=fact, recorded=False, now=True)
        self._steps += 1
        self._compare(self._each, facts)
        if self._steps <= STEPS_WITH_ALL or self._steps % ALL_EVERY == 0:
            self._compare(self._seldom, facts)

    def check_all(self, context: ForwardContext, tensors: Sequence[Tensor] = ()) -> None:
        """As `check` does in the first steps."""
        self._steps = 0
        self.check(context, tensors)

    def _compare(self, read: _Read, facts: tuple[Any, ...]) -> None:
        if read.differs is None:
            read.differs = read.comparison(self.names)
        try:
            if not read.differs(*facts):
                return
        except (AttributeError, LookupError, TypeError):  # metadata of another form
            pass
        for path, value in read.values.items():
            now = self._read(path, facts)
            if now != value or type(now) is not type(value):
                self._raise(path, value, now, facts)
        for path, kind in read.classes.items():
            now = self._read(path, facts)
            if type(now) is not kind:
                self._raise(path, Verbatim(f"a {kind.__qualname__}"), now, facts)
        first: dict[int, str] = {}
        for path, now in zip(read.apart, reader(read.apart, self.names)(*facts), strict=True):
            if (other := first.setdefault(id(now), path)) != path:
                self._raise(path, Verbatim("an object of its own"), Verbatim(other), facts)

    def _read(self, path: str, facts: tuple[Any, ...]) -> Any:
        try:
            return reader([path], self.names)(*facts)[0]
        except (AttributeError, LookupError, TypeError) as error:
            return error

    def _raise(self, path: str, recorded: Any, now: Any, facts: tuple[Any, ...]) -> NoReturn:
        """Name the first item that differs, in lists of the same length."""
        where, reader = self._places[path]
        if path in self._objects:
            recorded, path = self._objects[path], path[3:-1]
            now = self._read(path, facts)
        elif path in self._bounds:
            path, bound = self._bounds[path]
            recorded, now = f"at most {bound}", self._read(path, facts)
        elif path.startswith("repr("):
            recorded, now, path = Verbatim(recorded), Verbatim(now), path[5:-1]
        while isinstance(recorded, list | tuple) and type(now) is type(recorded):
            pairs = enumerate(zip(recorded, now, strict=False))
            at = next((at for at, (one, other) in pairs if one != other), None)
            if at is None or len(now) != len(recorded):
                break
            path, recorded, now = f"{path}[{at}]", recorded[at], now[at]
        for name, key in self.names.items():
            path = path.replace(name, repr(key))
        raise StaleContext(where=where, reader=reader, fact=path, recorded=recorded, now=now)

    def _is_new(self, path: str) -> bool:
        """Whether `path` was not read before; notes who reads it."""
        if path in self._places:
            return False
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_filename in _OURS:
            frame = frame.f_back
        code = frame.f_code
        self._places[path] = f"{code.co_filename}:{frame.f_lineno}", code.co_name
        return True


class _Read:
    """Values and classes by path, and what compares those of a step in one frame."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.classes: dict[str, type] = {}
        self.apart: list[str] = []
        """Paths of objects, each of which is another one."""
        self.differs: Callable[..., bool] | None = None

    def comparison(self, names: Mapping[str, Any]) -> Callable[..., bool]:
        values, classes, apart = (
            "".join(f"{path}, " for path in of) for of in (self.values, self.classes, self.apart)
        )
        names = {
            **names,
            "VALUES": tuple(self.values.values()),
            "CLASSES": (*map(type, self.values.values()), *self.classes.values()),
        }
        text = (
            f"lambda {FACTS}: (v := ({values})) != VALUES"
            f" or (*map(type, v), *map(type, ({classes}))) != CLASSES"
            f" or len({{*map(id, ({apart}))}}) != {len(self.apart)}"
        )
        differs: Callable[..., bool] = eval(text, names)
        return differs


_EXACT = (
    str, bytes, int, type, Enum, type(None), torch.Size, torch.dtype, torch.device, torch.layout,
    torch.memory_format, MethodType, BuiltinMethodType,
)  # fmt: skip


def _is_exact(value: Any) -> bool:
    """Whether a value of the same class that is equal is the same to any reader: 0.0 is -0.0, an
    empty range is any other, and in lists 1 is True."""
    if isinstance(value, list):
        return all(isinstance(each, str) for each in value)
    if isinstance(value, float):
        return bool(value) and value == value
    return isinstance(value, _EXACT)


_FACTS = (bool, int, str, tuple, torch.dtype, torch.device, torch.layout)


class TensorReads(TorchFunctionMode):
    """Tells `observer` what Python reads of a tensor that is no tensor: its sizes, dtype, class.

    A kernel that reads the tensor has them, too, and their tensors are compared. But of a tensor
    that no kernel reads, and of its number of rows, a graph has what Python made of it.
    """

    def __init__(self, observer: Observer, addressed: set[int], reads: StepReads) -> None:
        super().__init__()
        self._reads = reads
        self._observer = observer
        self._addressed = addressed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is Tensor.data_ptr:
            self._addressed.add(args[0].untyped_storage().data_ptr())
        else:
            given, made = tensors_in((args, kwargs)), tensors_in(result)
            if given and given[0] is args[0]:
                self._note(func, result, bool(made), args, kwargs or {})
            self._observer.derived(made, given)
        return result

    def _note(
        self, func: Any, result: Any, made: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Note what is no tensor of a function's result; `made` tells whether there are some."""
        observer, tensor, name = self._observer, args[0], getattr(func, "__name__", "")
        is_fact = isinstance(result, _FACTS) and not made
        if name == "__get__":
            name = func.__self__.__name__
            if is_fact:
                observer.tensor_fact(tensor, name, None, result)
                self._reads.gradient |= name == "requires_grad"
            elif name not in _VIEWS:
                observer.tensor_part(tensor, name, result)
        elif isinstance(result, UntypedStorage | TypedStorage):
            size = tensor.untyped_storage().nbytes()
            observer.tensor_fact(tensor, "untyped_storage().nbytes()", None, size)
        elif made and type(result) in (tuple, list):
            if any(_is_part(each, tensor) for each in result):  # as many as its sizes make
                observer.tensor_fact(tensor, "shape", None, tensor.shape)
        elif is_fact and (
            name == "__len__" or (not name.startswith("_") and hasattr(Tensor, name))
        ):
            observer.tensor_fact(tensor, name, (args[1:], kwargs), result)


def _is_part(value: Any, tensor: Tensor) -> bool:
    """Whether it is a view. What is computed has a kernel that reads the tensor, with its sizes."""
    return isinstance(value, Tensor) and storage_id(value) == storage_id(tensor)


_VIEWS = {"T", "mT", "H", "mH", "data", "real", "imag"}
"""Attributes of a tensor that are its memory in another form."""
