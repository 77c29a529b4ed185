"""Addresses of long-lived tensors, recorded when a graph is captured and compared in later steps.

A graph reads weights, caches and workspaces at their captured addresses. If one was moved or freed,
every replay would be silently wrong; comparing addresses makes it an error that names the tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from weakref import ref

from torch import Tensor, nn

from ...errors import MovedTensor
from ...torch_compat.modules import tensor_dict

Read = Callable[[], Tensor | None]

CHECKED_PER_STEP = 2
"""Tensors that a step compares after all were found in place, in turn."""


class _Watched:
    """A name, and how to read the tensor that it stands for now."""

    __slots__ = ("name", "read")

    def __init__(self, name: str, read: Read) -> None:
        self.name = name
        self.read = read


class Addresses:
    """The watched tensors of one prepared model, by name. `address` is the backend's.

    `changes` counts events after which sampling is not enough: a name was given to another tensor,
    or a tensor was found moved. Each snapshot then compares all once before it samples again.
    """

    __slots__ = ("_watched", "address", "changes")

    def __init__(self, address: Callable[[Tensor], int]) -> None:
        self.address = address
        self.changes = 0
        self._watched: dict[str, _Watched] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch one tensor without keeping it alive, so that freeing it is noticed.

        A name that is watched already stands for the new tensor from now on; snapshots taken
        before are stale.
        """
        self._watch(name, ref(tensor))

    def watch_module(self, module: nn.Module, names: Iterable[str] | None = None) -> None:
        """Watch parameters and buffers by qualified name, by default all; replaced ones too."""
        if names is None:
            names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            self._watch(name, partial(tensor_dict(owner, leaf).get, leaf))

    def _watch(self, name: str, read: Read) -> None:
        if name in self._watched:
            self._watched[name].read = read
            self.changes += 1
        else:
            self._watched[name] = _Watched(name, read)

    def snapshot(self, names: Iterable[str] | None = None) -> Snapshot:
        """Current addresses of the tensors called `names`, by default of all watched ones."""
        names = self._watched if names is None else names
        return Snapshot(self, [self._watched[name] for name in names])


class Snapshot:
    """The addresses that one recording, or the compiled code without a graph, relies on."""

    __slots__ = ("_addresses", "_entries", "_next", "_trusted")

    def __init__(self, addresses: Addresses, watched: Iterable[_Watched]) -> None:
        self._addresses = addresses
        self._entries = [(each, self._now(each)) for each in watched]
        self._next = 0
        self._trusted = -1  # `changes` when all were last found in place

    def moved(self) -> list[str]:
        """Names of tensors that were moved or freed; a recording with any is stale."""
        return [watched.name for watched, then in self._entries if self._now(watched) != then]

    def check_step(self) -> None:
        """Compare all at the first step and after a change, otherwise the next few in turn.

        Raises MovedTensor.
        """
        if self._trusted == self._addresses.changes:
            self.check_some(CHECKED_PER_STEP)
        else:
            self.check()
            self._trusted = self._addresses.changes

    def check(self) -> None:
        """Compare all. Raises MovedTensor for the first that was moved or freed."""
        self.check_some(len(self._entries))

    def check_some(self, count: int) -> None:
        """Compare the next `count` in turn. Raises MovedTensor."""
        entries, place, address = self._entries, self._next, self._addresses.address
        for _ in range(min(count, len(entries))):
            watched, then = entries[place]
            tensor = watched.read()
            now = None if tensor is None else address(tensor)
            if now != then:
                self._addresses.changes += 1
                raise MovedTensor(name=watched.name, recorded=_place(then), now=_place(now))
            place = (place + 1) % len(entries)
        self._next = place

    def _now(self, watched: _Watched) -> int | None:
        tensor = watched.read()
        return None if tensor is None else self._addresses.address(tensor)


def _place(address: int | None) -> str:
    return "freed" if address is None else hex(address)
