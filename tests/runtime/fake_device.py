"""A device that does not exist, and a backend for it that was written from `protocol.py` alone.

`DeviceGraph` is to the device what `torch.cuda.CUDAGraph` is to CUDA. The device has its tensors in
the memory of the host.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from piecegraph.runtime.backends.ownership import TensorTracker
from piecegraph.runtime.backends.protocol import Memory


class DeviceGraph(TorchDispatchMode):
    """Records kernels from `capture_begin` to `capture_end`, and undoes what they did."""

    def __init__(self):
        super().__init__()
        self.kernels = []
        self.num_bytes = 0
        self._before = []
        self._made = []

    def capture_begin(self):
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)
        with torch.inference_mode():
            for tensor, before in reversed(self._before):
                tensor.copy_(before)
            for tensor in self._made:  # nothing was executed
                tensor.fill_(-77)

    def replay(self):
        with torch.inference_mode():
            for kernel in self.kernels:
                kernel()

    def reset(self):
        self.kernels, self._made, self.num_bytes = [], [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._before += [(t.detach(), t.clone()) for t in tree_leaves(value)]
        result = func(*args, **kwargs)
        if not func.is_view:
            self._record(func, args, kwargs, result)
        return result

    def _record(self, func, args, kwargs, result):
        args, kwargs, places = tree_map_only(Tensor, Tensor.detach, (args, kwargs, result))
        used = {t.data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        places = [t for t in tree_leaves(places) if isinstance(t, Tensor)]
        made = [t for t in places if t.data_ptr() not in used]
        self.num_bytes += sum(t.nbytes for t in made)
        self._made += made

        def kernel():
            values = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, Tensor)]
            for place, value in zip(places, values, strict=True):
                if place.data_ptr() != value.data_ptr():
                    place.copy_(value)

        if "empty" not in func.__name__:
            self.kernels.append(kernel)


class _Tracker(TensorTracker):
    """All memory is the device's: a graph has no value of it."""

    def bakes(self, tensor):
        return False


@dataclass(eq=False)
class FakeGraph:
    graph: DeviceGraph

    @property
    def operations(self):
        return len(self.graph.kernels)

    @property
    def replay(self):
        return self.graph.replay

    def release(self):
        self.graph.reset()


class FakeCapture:
    def __init__(self, backend, pool, owned):
        self._backend, self._pool = backend, pool
        self._graph = DeviceGraph()
        self._tracker = _Tracker("CPU", owned)
        self._graph.capture_begin()
        self._tracker.start()

    def opaque(self, fn, args):
        return fn(*args)

    def end(self, run=False):
        self.abort()
        if self._tracker.refused is not None:
            raise self._tracker.refused
        if self._graph.num_bytes > self._backend.memory().free:
            raise torch.OutOfMemoryError("the device has no memory left")
        self._pool.append(self._graph)
        return FakeGraph(self._graph)

    def abort(self):
        self._tracker.stop()
        self._graph.capture_end()


class Reached:
    """A point in the work of a device that works at once."""

    def query(self):
        return True

    def synchronize(self): ...
    def wait(self, stream=None): ...


@dataclass(eq=False)
class FakeBackend:
    total: int = 1 << 30
    pools: list[list[DeviceGraph]] = field(default_factory=list)
    name: str = "fake"
    runs_python: bool = False
    notes_nodes: bool = False
    graph_class = DeviceGraph
    order_steps = None
    poison_result = None

    def new_pool(self):
        self.pools.append([])
        return self.pools[-1]

    def may_capture(self):
        return True

    def begin(self, pool, ownership):
        return FakeCapture(self, pool, ownership)

    def link(self, code, compiled):
        return code

    def install(self, graph, compiled):
        return graph.replay

    def recording(self, is_open):
        return nullcontext()

    def memory(self):
        used = sum(graph.num_bytes for pool in self.pools for graph in pool)
        return Memory(used, self.total - used)

    def working_memory(self, run):
        return 0

    def weak(self, tensor):
        return tensor.detach()

    address = staticmethod(Tensor.data_ptr)

    def event(self):
        return Reached()

    def prepare(self): ...
    def trim(self): ...
    def release_pool(self, pool): ...
    def release_held(self, pool): ...
    def synchronize(self): ...
    def wait(self): ...
