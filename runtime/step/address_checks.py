"""Addresses of long-lived tensors, recorded when a graph is captured and compared later.

A graph reads weights, caches and workspaces where they were. One that was given other memory, or
was freed, makes every replay silently wrong; comparing pointers makes it an error with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from weakref import ref

from torch import Tensor, nn

from ...errors import MovedTensor

Read = Callable[[], Tensor | None]

CHECKED_PER_STEP = 2
"""Tensors that a step compares once all were found in place, going round."""


class _Watched:
    """A name, and how to read the tensor that has it now."""

    __slots__ = ("name", "read")

    def __init__(self, name: str, read: Read) -> None:
        self.name = name
        self.read = read


class Addresses:
    """The watched tensors of one prepared model, by name. `address` is the backend's.

    `changes` counts the reasons to trust no sample: a name given to another tensor, a tensor found
    elsewhere. After one each snapshot compares everything again before it goes on sampling.
    """

    __slots__ = ("_watched", "address", "changes")

    def __init__(self, address: Callable[[Tensor], int]) -> None:
        self.address = address
        self.changes = 0
        self._watched: dict[str, _Watched] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch one tensor without keeping it alive: freeing it is what must be noticed.

        Under a name that is watched already it takes the place of the tensor before it, which
        makes snapshots of that one stale.
        """
        self._watch(name, ref(tensor))

    def watch_module(self, module: nn.Module, names: Iterable[str] | None = None) -> None:
        """Watch parameters and buffers by qualified name, also when they are replaced; by default
        all of them."""
        if names is None:
            names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
        for name in names:
            path, _, leaf = name.rpartition(".")
            owner = module.get_submodule(path)
            slots = owner._parameters if leaf in owner._parameters else owner._buffers
            self._watch(name, partial(slots.get, leaf))

    def _watch(self, name: str, read: Read) -> None:
        if name in self._watched:
            self._watched[name].read = read
            self.changes += 1
        else:
            self._watched[name] = _Watched(name, read)

    def snapshot(self, names: Iterable[str] | None = None) -> Snapshot:
        """Where the tensors called `names` are now; all watched ones by default."""
        names = self._watched if names is None else names
        return Snapshot(self, [self._watched[name] for name in names])


class Snapshot:
    """Addresses that one recording, or the compiled code, relies on."""

    __slots__ = ("_addresses", "_entries", "_next", "_trusted")

    def __init__(self, addresses: Addresses, watched: Iterable[_Watched]) -> None:
        self._addresses = addresses
        self._entries = [(each, self._now(each)) for each in watched]
        self._next = 0
        self._trusted = -1  # the number of changes when all were last found in place

    def moved(self) -> list[str]:
        """The tensors that are elsewhere or gone; a recording with any is stale."""
        return [watched.name for watched, then in self._entries if self._now(watched) != then]

    def check_step(self) -> None:
        """Compare all before the first step and after a change, and else the next few.

        Raises `MovedTensor`; all have had their turn after some steps.
        """
        if self._trusted == self._addresses.changes:
            self.check_some(CHECKED_PER_STEP)
        else:
            self.check()
            self._trusted = self._addresses.changes

    def check(self) -> None:
        """Compare all. Raises `MovedTensor` for the first that is elsewhere or gone."""
        self.check_some(len(self._entries))

    def check_some(self, count: int) -> None:
        """Compare the next `count`, going round. Raises `MovedTensor`."""
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
