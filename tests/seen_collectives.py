"""Sees which collectives reach torch, where none must. Nothing is registered here."""

from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.torch_compat.basics.ops import is_collective


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [func] * is_collective(func)
        return func(*args, **(kwargs or {}))
