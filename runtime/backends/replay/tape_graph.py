"""A graph of the replay backend: what its tape recorded, run in order on the recorded memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ....errors import MovedTensor
from ....torch_compat.basics.ops import OpOverload
from ..ownership import COMPILED_PIECE, memory_of
from ..protocol import Argument, GraphNode, GraphPart
from .tape import COPIES, Operation, Tape, poison


class TapeGraph:
    """A finished tape.

    `counters` and `released`, called with the memory that is freed, are the backend's. For
    `poisons` and `moved_is_error` see `ReplayOptions`.
    """

    def __init__(
        self,
        tape: Tape,
        counters: Counter[str],
        released: Callable[[TapeGraph, Iterable[Tensor]], None],
        *,
        poisons: bool,
        moved_is_error: bool,
    ) -> None:
        self.calls = tuple(tape.operations)
        self._made = tuple(tape.made.values())
        self._ownership = tape.ownership
        self._counters = counters
        self._released = released
        self._poisons = poisons
        self._moved_is_error = moved_is_error

    @property
    def operations(self) -> int:
        return len(self.calls)

    def replay(self) -> None:
        self.check_inputs()
        self.run()

    def run(self) -> None:
        """What a device does in a replay; the rest of it is done by the host."""
        if torch.is_inference_mode_enabled():
            self._run()
        else:
            with torch.inference_mode():  # inference tensors may be written in this mode alone
                self._run()

    def _run(self) -> None:
        self._counters["replays"] += 1
        self._counters["operations"] += len(self.calls)
        if self._poisons:
            for tensor in self._made:
                poison(tensor)
        for operation in self.calls:
            operation()

    def check_inputs(self) -> None:
        """Raise MovedTensor if asked to, and a tensor that the graph reads was moved."""
        for recorded, tensor in self._ownership.moved() if self._moved_is_error else ():
            name = f"a captured {tensor.dtype} tensor of shape {tuple(tensor.shape)}"
            raise MovedTensor(
                name=name, change="moved", recorded=hex(recorded), now=hex(tensor.data_ptr())
            )

    @property
    def parts(self) -> list[GraphPart]:
        parts: list[GraphPart] = []
        for op, tensors in self._nodes():
            if (is_piece := op == COMPILED_PIECE) or not parts or parts[-1].is_piece:
                parts.append(GraphPart(is_piece, []))
            arguments = [
                Argument(each.data_ptr(), self._ownership.is_made(each), [*each.shape])
                for each in tensors
            ]
            parts[-1].nodes.append(GraphNode(op, arguments))
        return parts

    @property
    def reads(self) -> list[Tensor]:
        """The tensors that its operations take."""
        return [tensor for _, tensors in self._nodes() for tensor in tensors]

    def _nodes(self) -> list[tuple[str, list[Tensor]]]:
        """Its operations in order: the op or "compiled piece", and the tensors that it takes."""
        calls = [op.args[0] if op.func in COPIES else op for op in self.calls]
        return [(_op_of(call), memory_of((call.args, call.keywords))) for call in calls]

    def release(self) -> None:
        self._released(self, self._made)
        self.calls = ()
        self._made = ()


def _op_of(call: Operation) -> str:
    op = next((each for each in (call.func, *call.args[:1]) if isinstance(each, OpOverload)), None)
    return COMPILED_PIECE if op is None else str(op)
