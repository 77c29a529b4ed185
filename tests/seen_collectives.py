"""Sees which collectives reach torch, where none must. Nothing is registered here."""

from piecegraph.torch_compat.basics.ops import is_collective
from piecegraph.torch_compat.basics.tensors import TorchDispatchMode


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += [func] * is_collective(func)
        return func(*args, **(kwargs or {}))
