"""Addresses of long-lived tensors, recorded when a graph is captured and compared later.

A graph reads weights, caches and workspaces where they were. One that was given other memory, or
was freed, makes every replay silently wrong; comparing pointers makes it an error with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from weakref import ref

from torch import Tensor, nn

from ..errors import MovedTensor

Read = Callable[[], Tensor | None]


class Addresses:
    """The watched tensors of one prepared model, by name. `address` is the backend's."""

    def __init__(self, address: Callable[[Tensor], int]) -> None:
        self._address = address
        self._reads: dict[str, Read] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch one tensor without keeping it alive: freeing it is what must be noticed."""
        self._reads[name] = ref(tensor)

    def watch_module(self, module: nn.Module) -> None:
        """Watch every parameter and buffer by its qualified name, also when it is replaced."""
        for path, owner in module.named_modules():
            for slots in (owner._parameters, owner._buffers):
                for leaf, tensor in slots.items():
                    if tensor is not None:
                        self._reads[f"{path}.{leaf}".lstrip(".")] = partial(slots.get, leaf)

    def snapshot(self, names: Iterable[str] | None = None) -> Snapshot:
        """Where the tensors called `names` are now; all watched ones by default."""
        reads = self._reads if names is None else {name: self._reads[name] for name in names}
        return Snapshot(self._address, reads)


class Snapshot:
    """Addresses that one recording relies on."""

    __slots__ = ("_address", "_entries", "_next")

    def __init__(self, address: Callable[[Tensor], int], reads: dict[str, Read]) -> None:
        self._address = address
        self._next = 0
        self._entries = [(name, read, self._now(read)) for name, read in reads.items()]

    def moved(self) -> list[str]:
        """The tensors that are elsewhere or gone; a recording with any is stale."""
        return [name for name, read, then in self._entries if self._now(read) != then]

    def check(self) -> None:
        """Compare all. Raises `MovedTensor` for the first that is elsewhere or gone."""
        self._check(len(self._entries))

    def check_some(self, count: int) -> None:
        """Compare the next `count`, going round: all have had their turn after some steps."""
        self._check(min(count, len(self._entries)))

    def _check(self, count: int) -> None:
        for _ in range(count):
            name, read, then = self._entries[self._next]
            self._next = (self._next + 1) % len(self._entries)
            now = self._now(read)
            if now != then:
                raise MovedTensor(name=name, recorded=_place(then), now=_place(now))

    def _now(self, read: Read) -> int | None:
        tensor = read()
        return None if tensor is None else self._address(tensor)


def _place(address: int | None) -> str:
    return "freed" if address is None else hex(address)
