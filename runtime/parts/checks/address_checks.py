"""Addresses and forms of long-lived tensors, recorded at a capture and compared in later steps.

A graph reads weights, caches and workspaces at their captured addresses. If one was moved or freed,
or has another form, every replay would be silently wrong; comparing makes it an error that names
the tensor.
"""

from __future__ import annotations

import ast
import ctypes
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from operator import attrgetter
from typing import Any, NoReturn
from weakref import ref

from torch import Tensor, nn

from ....compile.ir.serialization import dtype_name
from ....errors import HostValueChanged, MovedTensor, MovedWeight, StaleContext
from ....torch_compat.basics.modules import Place, place_of, place_reader, weight_place
from ....torch_compat.basics.tensors import (
    form_test,
    has_plain_memory,
    is_used,
    subclass_parts,
    weak_storage,
)
from ...forward_context import ForwardContext
from .step_reads import ALL_EVERY, STEPS_WITH_ALL, facts_of, reader

Read = Callable[[], Place | None]
"""Reads the place of the tensor that a name refers to now; None if it was freed."""

CHECKED_PER_STEP = 2
"""How many tensors a step compares, in turn, once all were found in place. A replaced one among n
is noticed within n / 2 steps, or immediately when a step or `refresh` compares all."""


@dataclass(slots=True)
class _Watched:
    """A name, and how to read the place of the tensor that it refers to now."""

    name: str
    read: Read


class Addresses:
    """The watched tensors of one prepared model, by name. `address` is the backend's.

    `changes` counts events after which sampling is not enough: a name was given to another tensor,
    or a tensor was found moved. Each snapshot then compares all once before it samples again.
    """

    def __init__(self, address: Callable[[Tensor], int]) -> None:
        def place(tensor: Tensor) -> Place:
            return address(tensor), tensor.shape, tensor.stride(), tensor.dtype

        self.address = address
        self._place = place
        self.changes = 0
        self._watched: dict[str, _Watched] = {}
        self._parts: dict[str, list[str]] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch the memory of a tensor without keeping it alive, so that freeing it is noticed.

        The tensor may be a view: its memory counts, not the Python object, which may be dropped. A
        name that is watched already refers to the new tensor from now on; earlier snapshots are
        stale.
        """
        alive, storage = ref(tensor), weak_storage(tensor)
        then = self._place(tensor)

        def read() -> Place | None:
            now = alive()
            if now is not None:
                return self._place(now)
            return then if is_used(storage) else None

        self._watch(name, read)
        self._parts[name] = [name]

    def watch_read(self, name: str, read: Callable[[], Any]) -> None:
        """Watch the tensor that `read` returns, which may be another one at each call."""

        def place_of_part(part: str) -> Place | None:
            try:
                return self._place_of(read(), part)
            except (AttributeError, TypeError):
                return None

        self._watch_parts(name, read(), lambda part: partial(place_of_part, part))

    def watch_module(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Watch parameters and buffers by qualified name; also replaced ones, and those of replaced
        submodules. Of a tensor subclass the inner tensors are watched."""
        for name, tensor in weights.items():
            self._watch_parts(name, tensor, partial(place_reader, module, name, self.address))

    def _watch_parts(self, name: str, tensor: Tensor, reads: Callable[[str], Read]) -> None:
        """Watch what holds the memory of `tensor`; `reads` gives what reads the place of a part."""
        parts = list(_attributes(tensor))
        self._parts[name] = [f"{name}.{part}" if part else name for part in parts]
        for label, part in zip(self._parts[name], parts, strict=True):
            self._watch(label, reads(part))

    def _watch(self, name: str, read: Read) -> None:
        if name in self._watched:
            self._watched[name].read = read
            self.changes += 1
        else:
            self._watched[name] = _Watched(name, read)

    def snapshot(
        self, names: Iterable[str] | None = None, bound: Mapping[str, Tensor] | None = None
    ) -> Snapshot:
        """Current places of the tensors called `names`, on which code without a graph relies; by
        default of all watched ones, for a graph. `bound` are those that the code itself holds and
        reads, whatever their names refer to now: a graph of it has the places of these."""
        of_graph = names is None
        names = self._parts if names is None else names
        entries = [entry for name in names for entry in self._places(name, (bound or {}).get(name))]
        return Snapshot(self, entries, of_graph)

    def _places(self, name: str, bound: Tensor | None) -> Iterator[tuple[_Watched, Place | None]]:
        for label in self._parts[name]:
            watched, part = self._watched[label], label.removeprefix(name).lstrip(".")
            yield watched, watched.read() if bound is None else self._place_of(bound, part)

    def _place_of(self, tensor: Tensor, part: str) -> Place:
        return weight_place(attrgetter(part)(tensor) if part else tensor, self.address)


class Snapshot:
    """The places that one recording, or the compiled code without a graph, relies on."""

    def __init__(
        self,
        addresses: Addresses,
        entries: list[tuple[_Watched, Place | None]],
        of_graph: bool = True,
    ) -> None:
        self._addresses = addresses
        self._of_graph = of_graph
        self._entries = entries
        starts = range(0, max(1, len(self._entries)), CHECKED_PER_STEP)
        in_turn = [self._entries[start : start + CHECKED_PER_STEP] for start in starts]
        self._in_turn = cycle(in_turn)
        self._trusted = -1  # `changes` when all were last found in place
        self.values: tuple[HostValue, ...] = ()
        """What the recording has the value of. All are compared in every step."""

    def moved(self) -> list[str]:
        """Names of tensors that were moved or freed or have another form; a recording with any is
        stale."""
        names = [watched.name for watched, then in self._entries if watched.read() != then]
        return names + [value.name for value in self.values if value.changed()]

    def check_step(self, context: object = None, tensors: object = None) -> None:
        """Compare all at the first step and after a change, otherwise the next few in turn.

        Raises MovedTensor, and HostValueChanged.
        """
        for value in self.values:
            if value.changed():
                raise HostValueChanged(where=value.where, name=value.name)
        if self._trusted != self._addresses.changes:
            self.check()
            self._trusted = self._addresses.changes
            return
        for watched, then in next(self._in_turn):
            if watched.read() != then:
                self._moved(watched, then)

    def check_all(self, context: object = None, tensors: object = None) -> None:
        """As `check_step` does first."""
        self._trusted = -1
        self.check_step()

    def check(self) -> None:
        """Compare all. Raises MovedTensor for the first that differs."""
        for watched, then in self._entries:
            if watched.read() != then:
                self._moved(watched, then)

    def _moved(self, watched: _Watched, then: Place | None) -> NoReturn:
        self._addresses.changes += 1
        error = MovedTensor if self._of_graph else MovedWeight
        _raise_moved(watched.name, then, watched.read(), error)

    def addresses(self) -> set[int]:
        """The addresses that were recorded."""
        return {place[0] for _, place in self._entries if place is not None}


class HostValue:
    """A tensor on the host whose value a graph has, and the user's line that read it."""

    def __init__(self, name: str, tensor: Tensor, where: str | None) -> None:
        self.name = name
        self.where = where
        self._tensor = tensor
        self._then = self._bytes()

    def changed(self) -> bool:
        return self._bytes() != self._then

    def _bytes(self) -> bytes:
        """The first 1,024 bytes."""
        memory = self._tensor.untyped_storage()
        return ctypes.string_at(memory.data_ptr(), min(memory.nbytes(), 1024))


def _raise_moved(
    name: str, then: Any, now: Any, error: type[MovedTensor] = MovedTensor
) -> NoReturn:
    """Name what differs: the address, or else the form."""
    change = "moved"
    if then is None or now is None or then[0] != now[0]:
        recorded, current = (hex(p[0]) if p is not None and p[0] else "freed" for p in (then, now))
    else:
        change = "has another form"
        recorded, current = map(_form_text, (then, now))
    raise error(name=name, change=change, recorded=recorded, now=current)


def _form_text(place: tuple[Any, ...]) -> str:
    _, shape, strides, dtype, *views = place
    names = [
        f"{name} " for name, is_so in zip(("conjugated", "negated"), views, strict=False) if is_so
    ]
    return f"{''.join(names)}{dtype_name(dtype)}{list(shape)} with strides {tuple(strides)}"


def _attributes(tensor: Tensor | None) -> Iterable[str]:
    """Attribute paths from a tensor to the tensors that hold its memory; "" for itself."""
    inner = {} if tensor is None else subclass_parts(tensor)[0]
    if not inner:
        yield ""
    for name, part in inner.items():
        for rest in _attributes(part):
            yield f"{name}.{rest}".rstrip(".")


class MetadataAddresses:
    """Addresses and forms of those tensors of metadata and layers that a graph reads, by path.

    A graph reads them where and as they were at capture, so a step must be given the same memory in
    the same form. Only the number of rows may differ: a graph reads as many as at its capture.
    Compared are all in the first three steps of each graph and in one of ALL_EVERY, or
    of four times as many as there are. In every other step METADATA_PER_STEP are compared, in turn;
    layers that share a tensor count as one.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        storages: Collection[int],
        names: Mapping[str, Any],
    ) -> None:
        """`tensors` by path, an expression in which `names` may occur; see `step_reads.reader`.
        `storages` are addresses of the memory that the graph reads."""
        read = {
            path: tensor
            for path, tensor in tensors.items()
            if tensor.numel() and tensor.untyped_storage().data_ptr() in storages
        }
        self._names = names
        self._expected = {path: place_of(tensor) for path, tensor in read.items()}
        self._every = max(ALL_EVERY, 4 * len(read))
        paths = list({id(tensor): path for path, tensor in read.items()}.values())
        parts = [paths[i : i + METADATA_PER_STEP] for i in range(0, len(paths), METADATA_PER_STEP)]
        self._in_turn = cycle([_Group(part, read, names) for part in parts or [[]]])
        self._all = _Group(list(read), read, names)
        self._steps = 0

    def __bool__(self) -> bool:
        return bool(self._expected)

    def addresses(self) -> set[int]:
        """The addresses that steps compare."""
        return {place[0] for place in self._expected.values()}

    def check_all(self, context: ForwardContext, tensors: object = None) -> None:
        """As `check_step` does in the first steps."""
        self._steps = 0
        self.check_step(context)

    def check_step(self, context: ForwardContext, tensors: object = None) -> None:
        """Compare one step's. Raises MovedTensor for a tensor in another place, and StaleContext
        where there is none."""
        self._steps += 1
        in_turn = self._steps > STEPS_WITH_ALL and self._steps % self._every
        group = next(self._in_turn) if in_turn else self._all
        facts, now = facts_of(context), ()
        try:
            now = group.read(*facts)
            if group.fits(*now) and (*map(Tensor.data_ptr, now),) == group.addresses:
                return
        except (AttributeError, LookupError, TypeError):  # metadata of another form
            pass
        for path, then, now in self._moved(facts):
            if not isinstance(now, Tensor):
                raise StaleContext(reader="a kernel", fact=path, recorded="a tensor", now=now)
            _raise_moved(path, then, place_of(now))
        if all(map(Tensor.numel, now)):  # the same form in another mode, such as inference mode
            group.fits = _fits(now)

    def moved(self, context: ForwardContext) -> list[str]:
        """Paths of the layers' tensors that are in another place."""
        return [path for path, _, _ in self._moved(facts_of(context)) if path.startswith("layers")]

    def _moved(self, facts: tuple[Any, ...]) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
        """What is in another place: its path, its place at the capture, and what is there now."""
        for path, then in self._expected.items():
            try:
                (now,) = reader([path], self._names)(*facts)
            except (AttributeError, LookupError, TypeError) as error:
                now = error
            empty = isinstance(now, Tensor) and not now.numel()
            same = isinstance(now, Tensor) and _without_rows(place_of(now)) == _without_rows(then)
            if not empty and not same:
                yield path, then, now


class _Group:
    """Tensors that are compared at once: what reads them, and what tests their form."""

    def __init__(
        self, paths: Sequence[str], tensors: Mapping[str, Tensor], names: Mapping[str, Any]
    ) -> None:
        expected = [tensors[path] for path in paths]
        self.read = reader(paths, names)
        self.fits = _fits(expected)
        self.addresses = (*map(Tensor.data_ptr, expected),)


def _fits(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """A test for the form of `tensors` but for their rows. False where each is to be looked at."""
    if not tensors or not all(map(has_plain_memory, tensors)):
        return lambda *now: not now
    return form_test(tensors, any_rows=True)


METADATA_PER_STEP = 4
_PLAIN = (ast.Expression, ast.Attribute, ast.Subscript, ast.Name, ast.Constant, ast.Load)


def with_expressions(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those whose path is an expression: of attributes, and of keys that are text or numbers."""
    return {path: tensor for path, tensor in tensors.items() if _is_plain(path)}


def _without_rows(place: tuple[Any, ...]) -> tuple[Any, ...]:
    return place[0], place[1][1:], *place[2:]


def _is_plain(path: str) -> bool:
    try:
        return all(isinstance(node, _PLAIN) for node in ast.walk(ast.parse(path, mode="eval")))
    except SyntaxError:
        return False
