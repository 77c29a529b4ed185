"""A captured graph whose replays wait in the queue of the replay backend."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ....compile.ir.ops import tensors_in
from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.tensors import storage_id
from ..protocol import BoundGraph, Mark, Replay, Sizes
from .delayed_code import DelayedStep, delays
from .tape_graph import TapeGraph
from .work_queue import WorkQueue


def delayed_replay(queue: WorkQueue, compiled: CompiledModel, graph: BoundGraph) -> Replay:
    """Replays `graph` in the queue: the copies of inputs, each of its graphs and each splitting op
    are one part of the queued work."""

    def replay(tensors: tuple[Any, ...], sizes: Sizes, copied: Mark) -> Sequence[Any]:
        if not delays(queue):
            return graph.replay(tensors, sizes, copied)
        load, fresh = graph.at(sizes)
        step = DelayedStep(queue, compiled, tensors)
        step.put(partial(load, tensors), tensors, tensors, graph.copied_inputs)
        copied()
        results = tensors_in(graph.outputs)
        in_place = [*tensors, *step.metadata]
        for call in graph.calls:
            tape = getattr(call, "__self__", None)
            if not isinstance(tape, TapeGraph):  # a splitting op
                step.put(call, (), step.metadata, results)
                continue
            tape.check_inputs()
            memory = set(map(storage_id, tape.reads))
            compared = [each for each in in_place if storage_id(each) in memory]
            step.put(tape.run, tape.reads, compared, results)
        graph.copy_back(tensors)
        queue.overwritten(results, step.name)
        made = [result() for result in fresh]
        for result in tensors_in(made):
            queue.made(result, step.name)
        return made

    return replay
