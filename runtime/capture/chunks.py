"""Steps larger than the largest size: PIECEWISE graphs over consecutive chunks of the tokens.

The pieces of one segment are replayed chunk by chunk; splitting ops such as attention run once, on
the whole batch. Between the two, values live in tensors of the whole batch: each chunk of them is
copied to where the graph reads it, and its results are copied back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...compile.ir.config import TOKENS
from ...compile.ir.ops import resolve_op
from ...compile.ir.plan import CallStep, PieceStep, Plan
from ...compile.ir.serialization import decode, refs
from ...compile.plan.codegen import used
from ...compile.plan.compiled_model import CompiledModel
from ...torch_compat.basics.ops import mutated_arguments
from ..step.row_mixing import form_of
from .recording import Recording

Load = Callable[[tuple[Any, ...]], None]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start` to `stop` of a step, run by `recording`; `load` copies the step's inputs."""

    start: int
    stop: int
    recording: Recording
    load: Load


class ChunkedStep:
    """Runs a model's steps in chunks; one step at a time."""

    def __init__(self, compiled: CompiledModel) -> None:
        plan = compiled.plan
        self._plan = plan
        self._uses = [step for step in plan.steps if isinstance(step, PieceStep)]
        self._step = compiled.link(piece_hook=self._piece)
        self._dims = {name: _token_dim(plan, name) for name in _values(plan)}
        self._chunks: Sequence[Chunk] = ()
        self._inputs: tuple[Any, ...] = ()

    def run(self, chunks: Sequence[Chunk], inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The results of a step on its real inputs, as new tensors."""
        self._chunks, self._inputs = chunks, inputs
        try:
            return self._step(*inputs)
        finally:
            self._chunks, self._inputs = (), ()

    def _piece(self, use: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What the linked step calls for a piece: the piece's graph of each chunk."""

        def run(args: list[Any]) -> list[Tensor]:
            step, num_tokens = self._uses[use], self._chunks[-1].stop
            takes_inputs = any(item.name in step.args for item in self._plan.inputs)
            wholes: list[Tensor] = []
            for chunk in self._chunks:
                captured = chunk.recording.pieces[use]
                if not wholes:
                    wholes = [
                        self._whole(name, result, num_tokens)
                        for name, result in zip(step.outs, captured.results, strict=True)
                    ]
                with torch.inference_mode():  # in which tensors of either kind may be written
                    if takes_inputs:
                        chunk.load(self._slices(chunk))
                    for name, target, value in zip(step.args, captured.args, args, strict=True):
                        if name.startswith("t") and isinstance(value, Tensor):
                            self._part(name, target, chunk).copy_(self._rows(name, value, chunk))
                    if captured.replay is not None:
                        captured.replay()
                    for name, whole, result in zip(
                        step.outs, wholes, captured.results, strict=True
                    ):
                        self._rows(name, whole, chunk).copy_(self._part(name, result, chunk))
            return wholes

        return run

    def _slices(self, chunk: Chunk) -> tuple[Any, ...]:
        """The step's inputs, cut to a chunk."""
        return tuple(
            self._rows(item.name, tensor, chunk)
            for item, tensor in zip(self._plan.inputs, self._inputs, strict=True)
        )

    def _whole(self, name: str, result: Tensor, num_tokens: int) -> Tensor:
        """Memory for a value of the whole step."""
        shape, dim = list(result.shape), self._dims[name]
        if dim is not None:
            shape[dim] = num_tokens
        with torch.inference_mode(False):
            return torch.empty(shape, dtype=result.dtype, device=result.device)

    def _rows(self, name: str, whole: Tensor, chunk: Chunk) -> Tensor:
        """A chunk's part of a value of the whole step."""
        dim = self._dims[name]
        return whole if dim is None else whole.narrow(dim, chunk.start, chunk.stop - chunk.start)

    def _part(self, name: str, static: Tensor, chunk: Chunk) -> Tensor:
        """The real rows of a graph's own tensor."""
        dim = self._dims[name]
        return static if dim is None else static.narrow(dim, 0, chunk.stop - chunk.start)


def chunk_obstacle(compiled: CompiledModel, owned: Collection[str]) -> str | None:
    """Why a model's steps cannot run in chunks, or None. `owned` are inputs that graphs read in
    place."""
    plan = compiled.plan
    if not compiled.traced or plan.partition_ops:
        return "the model is not split into pieces"
    if len(plan.symbols) > 1:
        return "inputs have dynamic dimensions beside num_tokens"
    written = [str(item.path[0]) for item in plan.inputs if item.written]
    if written := written + [weight.target for weight in plan.weights if weight.written]:
        return f"the model writes to {written[0]!r}"
    if owned:
        return f"the input {min(owned)!r} is a buffer of the engine"
    for name in _values(plan):
        shape, tokens = plan.shapes.get(name, ""), _token_names(plan)
        if name.startswith("t") and "[" not in shape:
            return "a piece returns a value that is no tensor"
        dims = [str(dim) for dim in form_of(plan, name)[1]]
        dims = [dim for dim in dims if tokens.intersection(re.findall(r"\w+", dim))]
        if len(dims) > 1 or not tokens.issuperset(dims):
            return f"a value has the shape {shape or dims}"
    computed = {
        name
        for step in plan.steps
        if isinstance(step, PieceStep)
        for at, name in enumerate(step.outs)
        if at not in plan.pieces[step.piece].unwritten
    }
    for call in plan.calls():
        if computed.intersection(_written(call)):
            return f"{call.op} writes to a value that a piece has computed"
    return None


def _written(call: CallStep) -> Sequence[str]:
    """The values that a splitting op writes to."""
    args = [decode(argument) for argument in call.args]
    kwargs = {name: decode(argument) for name, argument in call.kwargs.items()}
    return refs(list(mutated_arguments(resolve_op(call.op), args, kwargs)))


def _values(plan: Plan) -> list[str]:
    """The names of all inputs and intermediate values."""
    names = [item.name for item in plan.inputs]
    for step in plan.steps:
        names += [name for name in (*used(step), *step.outs) if name and name.startswith("t")]
    return list(dict.fromkeys(names))


def _token_dim(plan: Plan, name: str) -> int | None:
    tokens = _token_names(plan)
    dims = enumerate(form_of(plan, name)[1])
    return next((at for at, dim in dims if str(dim) in tokens), None)


def _token_names(plan: Plan) -> set[str]:
    """What the number of tokens is called in shapes."""
    return {TOKENS, *(symbol.name for symbol in plan.symbols if symbol.label == TOKENS)}
