"""Steps whose work waits in a queue: the host's part of a step is done, the rest is queued.

Only the replay backend has a queue, with `ReplayOptions(delay=True)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....compile.ir.ops import tensors_in
from ....compile.ir.plan import Plan, evaluated
from ....compile.plan.compiled_model import CompiledModel
from ....torch_compat.basics.tensors import storage_id, without_modes
from ...forward_context import CURRENT, ForwardContext, forward_context
from ...tensors_by_path import tensors_by_path
from ..protocol import BoundGraph, Mark, Replay, Sizes
from .tape import poison
from .tape_graph import TapeGraph
from .work_queue import WorkQueue


class DelayedStep:
    """One step: `put` queues its parts, which run in the step's forward context.

    Splitting ops find a copy of the step's metadata, with its tensors: what else it holds they read
    on the host, before `run` returns on a device.
    """

    def __init__(self, queue: WorkQueue, compiled: CompiledModel, inputs: Sequence[Tensor]) -> None:
        context = CURRENT.get()
        assert isinstance(context, ForwardContext)
        queue.steps += 1
        decision = context.decision
        self.name = f"step {queue.steps} ({decision.mode.name} {decision.descriptor.num_tokens})"
        metadata = list(tensors_by_path("metadata", context.metadata))
        layers = list(tensors_by_path("layers", context.layers))
        weights = compiled.weights.items()
        labels = [f"input {item.label!r}" for item in compiled.plan.inputs]
        self._names = [*zip(labels, inputs, strict=True), *metadata, *layers]
        self.weights = {name: each.detach() for name, each in weights}  # at their present addresses
        named = self.weights.items() if compiled.traced else _named_tensors(compiled.model)
        self._names += named
        self.metadata = [each for _, each in metadata]
        written = {weight.target for weight in compiled.plan.weights if weight.written}
        self._state = [each for _, each in layers]
        self._state += [each for name, each in weights if name in written]
        self._queue = queue
        try:
            copied = deepcopy(context.metadata, {id(each): each for each in self.metadata})
        except Exception:  # what cannot be copied is read later than on a device
            copied = context.metadata
        self._context = ForwardContext(context.layers, copied, decision, context.num_tokens)

    def put(
        self,
        run: Callable[[], object],
        reads: Sequence[Tensor],
        compared: Sequence[Tensor],
        writes: Sequence[Tensor],
    ) -> None:
        """Queue a part of the step; see `WorkQueue.put`."""
        self._queue.put(
            self.name,
            partial(self._run, run),
            reads=reads,
            compared=compared,
            writes=writes,
            state=self._state,
            names=self._names,
        )

    def _run(self, run: Callable[[], object]) -> None:
        with torch.no_grad(), forward_context(self._context):
            run()


def _named_tensors(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """What a model that is not traced may read by itself."""
    return [*model.named_parameters(), *model.named_buffers()]


def delays(queue: WorkQueue | None) -> bool:
    """Whether what runs now belongs to a step whose work is to be queued."""
    context = CURRENT.get()
    stepping = isinstance(context, ForwardContext) and context.decision is not None
    return queue is not None and stepping and not queue.busy and queue.watch()


def delayed_code(
    queue: WorkQueue, compiled: CompiledModel, call: Callable[..., tuple[Any, ...]]
) -> Callable[..., tuple[Any, ...]]:
    """Compiled code that is queued in a step; its results have no values yet.

    Code that is not traced runs at once: the form of its results is not known.
    """

    def run(*tensors: Any) -> tuple[Any, ...]:
        if not compiled.traced or not delays(queue):
            queue.drain()
            return call(*tensors)
        step = DelayedStep(queue, compiled, tensors)
        results = _empty_results(compiled.plan, tensors)
        places = [result for result in results if isinstance(result, Tensor)]
        compared = [*tensors, *step.metadata]
        fill = partial(_fill, compiled, call, step.weights, tensors, results)
        step.put(fill, (*tensors, *step.weights.values()), compared, places)
        return results

    return run


def _fill(
    compiled: CompiledModel,
    call: Callable[..., Any],
    weights: Mapping[str, Tensor],
    tensors: Sequence[Tensor],
    results: Sequence[Any],
) -> None:
    """Run code on the weights that it had when it was queued."""
    if any(now.data_ptr() != weights[name].data_ptr() for name, now in compiled.weights.items()):
        call = replace(compiled, weights=weights).link()
    for place, result in zip(results, call(*tensors), strict=True):
        if isinstance(place, Tensor):
            place.copy_(result)


def _empty_results(plan: Plan, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What the code returns for `tensors`, poisoned instead of computed."""
    sizes: Mapping[str, Any] = {
        symbol.name: tensors[int(symbol.source[1:])].shape[symbol.dim] for symbol in plan.symbols
    }

    def empty(dtype: str | None, name: str, shape: Sequence[int | str]) -> Any:
        if dtype is None:
            return evaluated(name, sizes)
        dims = [evaluated(dim, sizes) for dim in shape]
        with torch.inference_mode(False), without_modes():
            return poison(torch.empty(dims, dtype=getattr(torch, dtype), device="cpu"))

    return tuple(empty(result.dtype, result.name, result.shape) for result in plan.results)


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
        queue.overwritten(results, step.name)
        made = [result() for result in fresh]
        graph.copy_back(tensors)
        for result in tensors_in(made):
            queue.made(result, step.name)
        return made

    return replay
