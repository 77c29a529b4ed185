"""A captured graph whose replays wait in the queue of the replay backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ....compile.ir.ops import tensors_in
from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.tensors import storage_id
from ...capture.installed_graph import WritingGraph
from ...core.static_inputs import Mark, Sizes
from .backend import TapeGraph
from .delayed_code import DelayedStep, delays
from .work_queue import WorkQueue


class DelayedGraph(WritingGraph):
    """Copies of inputs, graphs and splitting ops are each one part of the queued work."""

    __slots__ = ("_compiled", "_queue")

    def __init__(self, queue: WorkQueue, compiled: CompiledModel, *rest: Any) -> None:
        super().__init__(compiled.plan, *rest)
        self._queue = queue
        self._compiled = compiled

    def replay(self, tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        if not delays(self._queue):
            return super().replay(tensors, sizes, copied)
        self.addresses.check_step()
        load, fresh = self._by_size.get(sizes) or self._prepare(sizes)
        step = DelayedStep(self._queue, self._compiled, tensors)
        step.put(partial(load, tensors), tensors, tensors, self._inputs.copied)
        copied()
        results = tensors_in(self.recording.outputs)
        in_place = [*tensors, *step.metadata]
        for call in self.recording.calls:
            graph = getattr(call, "__self__", None)
            if not isinstance(graph, TapeGraph):  # a splitting op
                step.put(call, (), step.metadata, results)
                continue
            graph.check_inputs()
            memory = set(map(storage_id, graph.reads))
            compared = [each for each in in_place if storage_id(each) in memory]
            step.put(graph.run, graph.reads, compared, results)
        self._inputs.copy_back(tensors)
        self._queue.overwritten(results, step.name)
        made = [result() for result in fresh]
        for result in tensors_in(made):
            self._queue.made(result, step.name)
        return made
