"""What does a step cost when its kernels are free?

A model of 32 splitting calls that do nothing, with graphs that do nothing: the rest of a step is
the library's work. It is measured in turn with a bare loop over the same callables,
without dispatch, inputs and results; with one wrapper per piece; and, without graphs, with the same
compiled code called directly. No GPU is used.

`IdleModel` has one input and no weights, so its FULL step is a lower bound. `ServedModel` is what
an engine has: 32 weights, 32 watched caches, four inputs, a new `Batch` and metadata each step,
through `prepared(...)`. The long form adds real pieces on the CPU, see `real_pieces`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, make_dataclass
from functools import partial
from typing import Any

import torch

from piecegraph import (
    Batch,
    Config,
    GraphMode,
    PreparedModel,
    RuntimeMode,
    get_forward_context,
    prepare,
)
from piecegraph.compile.plan.compiled_model import CompiledModel
from piecegraph.runtime.backends.protocol import BoundGraph, Code, Memory, Replay
from piecegraph.runtime.backends.replay.work_queue import QueuePoint
from piecegraph.torch_compat.basics.tensors import form_test

from .piece_wrapper import wrapped_step
from .real_pieces import real_rows
from .timing import LIBRARY, interleaved, row

NUM_TOKENS, LAYERS, HIDDEN = 4, 32, 8
QUICK = (31, 100)
"""Rounds, and steps in each."""

LIBRARY.define("idle(Tensor x, Tensor(a!) output, str layer_name) -> ()")


def _idle(x: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    pass


LIBRARY.impl("idle", _idle, "CPU")
torch.library.register_fake("piecegraph_bench::idle", _idle, lib=LIBRARY)

LIBRARY.define("reading(Tensor x, Tensor(a!) output, str layer_name) -> ()")


def _reading(x: torch.Tensor, output: torch.Tensor, layer_name: str) -> None:
    metadata = get_forward_context().metadata
    for field in fields(metadata):
        getattr(metadata, field.name)


LIBRARY.impl("reading", _reading, "CPU")
torch.library.register_fake("piecegraph_bench::reading", _idle, lib=LIBRARY)

_TENSORS = {f"tensor_{n}": torch.zeros(NUM_TOKENS, dtype=torch.int64) for n in range(10)}
_VALUES = {f"value_{n}": n for n in range(10)}
FieldsOf20: type[Any] = make_dataclass("FieldsOf20", [*_TENSORS, *_VALUES])
"""Metadata of attention: ten tensors that stay where they are, and ten numbers."""


class IdleGraph:
    """A capture, which runs what it captures, and its graph, which runs nothing."""

    operations = 1
    parts = ()

    def opaque(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        return fn(*args)

    def end(self, run: bool = False) -> IdleGraph:
        return self

    def abort(self) -> None:
        pass

    def replay(self) -> None:
        pass

    def release(self) -> None:
        pass


class IdleBackend:
    """A graph backend whose graphs do nothing when they are replayed, so that a step consists of
    the library's own work and of calls that cost next to nothing."""

    name = "idle"
    runs_python = False
    notes_nodes = False
    order_steps = None
    graph_class = None
    poison_result = None

    def new_pool(self) -> Any:
        return None

    def prepare(self) -> None:
        pass

    def trim(self) -> None:
        pass

    def release_pool(self, pool: Any) -> None:
        pass

    def link(self, code: Code, compiled: CompiledModel) -> Code:
        return code

    def install(self, graph: BoundGraph, compiled: CompiledModel) -> Replay:
        return graph.replay

    def recording(self, is_open: Callable[[], bool]) -> AbstractContextManager[Any]:
        return nullcontext()

    def may_capture(self) -> bool:
        return True

    def begin(self, pool: Any, ownership: Any) -> IdleGraph:
        return IdleGraph()

    def release_held(self, pool: Any) -> None:
        pass

    def weak(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    address = staticmethod(torch.Tensor.data_ptr)

    def memory(self) -> Memory:
        return Memory(0, 0)

    def working_memory(self, run: Callable[[], None]) -> int:
        return 0

    def synchronize(self) -> None:
        pass

    def wait(self) -> None:
        pass

    def event(self) -> QueuePoint:
        return QueuePoint(None)


class IdleModel(torch.nn.Module):
    """`LAYERS` splitting calls with one addition before each and one after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_names = [f"layers.{i}" for i in range(LAYERS)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer_name in self.layer_names:
            x = x + 1
            output = torch.empty_like(x)
            torch.ops.piecegraph_bench.idle(x, output, layer_name)
            x = output
        return x + 1


class ServedModel(torch.nn.Module):
    """`IdleModel` with a weight per layer and three more inputs, or with another splitting op."""

    def __init__(self, op: str = "idle") -> None:
        super().__init__()
        self.op = getattr(torch.ops.piecegraph_bench, op)
        self.layer_names = [f"layers.{i}" for i in range(LAYERS)]
        self.scales = torch.nn.ParameterList(torch.ones(HIDDEN) for _ in range(LAYERS))

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        adapter_ids: torch.Tensor,
    ) -> torch.Tensor:
        x = x + positions.unsqueeze(-1) + adapter_ids.unsqueeze(-1)
        for layer_name, scale in zip(self.layer_names, self.scales, strict=True):
            x = x * scale
            output = torch.empty_like(x)
            self.op(x, output, layer_name)
            x = output
        return x + slot_mapping.unsqueeze(-1)


def run(quick: bool) -> dict[str, Any]:
    """Rows in microseconds per step; `ratios` are medians over paired runs.

    `piecewise_over_floor`, `wrapper_over_piecewise`, `none_over_stitched`. `full_us` is what a FULL
    step of `IdleModel` costs beyond the launch of its graph, a lower bound; `served_us` is that of
    `ServedModel`, `served_padded_us` with padding, `served_metadata_us` with metadata of 20 fields,
    `served_buffers_us` with buffers of the engine, and `least_us` that of a step with such buffers
    written by hand.
    """
    rounds, steps = QUICK if quick else (51, 500)
    rows = _piecewise(rounds, steps) + _none(rounds, steps) + _full(rounds, steps)
    rows += _served(rounds, steps)
    if not quick:
        rows += real_rows(rounds=15, steps=20)
    measured = {row["step"]: row for row in rows}

    def own(step: str) -> float:
        return float(measured[step]["us"] - measured[step]["other_us"])

    return {
        "ratios": {
            "piecewise_over_floor": measured["PIECEWISE"]["over"],
            "wrapper_over_piecewise": measured["wrapper per piece"]["over"],
            "none_over_stitched": measured["NONE"]["over"],
        },
        "full_us": own("FULL"),
        "served_us": own("FULL, served"),
        "served_padded_us": own("FULL, served, padded"),
        "served_metadata_us": own("FULL, served, metadata of 20 fields"),
        "served_buffers_us": own("FULL, served, the engine's buffers"),
        "served_buffers_padded_us": own("FULL, served, the engine's buffers, padded"),
        "least_us": own("least step, by hand"),
        "rows": rows,
    }


def _piecewise(rounds: int, steps: int) -> list[dict[str, Any]]:
    x = torch.zeros(NUM_TOKENS, HIDDEN)
    prepared = _prepared(GraphMode.PIECEWISE)
    try:
        step, loop = _step(prepared, RuntimeMode.PIECEWISE, x), _bare_loop(prepared)
        wrapped = wrapped_step(prepared, dict.fromkeys(IdleModel().layer_names, 0), (x,))
        times = interleaved([step, loop, wrapped], rounds, steps)
    finally:
        prepared.close()
    return [
        row("PIECEWISE", "bare loop", times[0], times[1]),
        row("wrapper per piece", "PIECEWISE", times[2], times[0]),
    ]


def _none(rounds: int, steps: int) -> list[dict[str, Any]]:
    x = torch.zeros(NUM_TOKENS, HIDDEN)
    prepared = _prepared(GraphMode.NONE)
    try:
        step, stitched = _step(prepared, RuntimeMode.NONE, x), prepared.compiled.link()
        times = interleaved([step, lambda: stitched(x)], rounds, steps // 2)
    finally:
        prepared.close()
    return [row("NONE", "stitched function", times[0], times[1])]


def _full(rounds: int, steps: int) -> list[dict[str, Any]]:
    """With the input copied into a static buffer, and with a buffer of the engine."""
    rows = []
    buffer = torch.zeros(NUM_TOKENS, HIDDEN)
    for name, buffers in (("FULL", {}), ("FULL, the engine's buffer", {"x": buffer})):
        prepared = _prepared(GraphMode.FULL_DECODE_ONLY, buffers)
        try:
            step, loop = _step(prepared, RuntimeMode.FULL, buffer), _bare_loop(prepared)
            times = interleaved([step, loop], rounds, steps * 5)
        finally:
            prepared.close()
        rows.append(row(name, "bare loop", *times))
    return rows


def _served(rounds: int, steps: int) -> list[dict[str, Any]]:
    """FULL steps of `ServedModel`: all rows real, with padding, with the engine's buffers."""
    rows = []
    for name, num_tokens, own, metadata_of in (
        ("FULL, served", NUM_TOKENS, False, object),
        ("FULL, served, padded", NUM_TOKENS - 1, False, object),
        ("FULL, served, the engine's buffers", NUM_TOKENS, True, object),
        ("FULL, served, the engine's buffers, padded", NUM_TOKENS - 1, True, object),
        ("FULL, served, metadata of 20 fields", NUM_TOKENS, False, metadata_of_20),
    ):
        inputs = served_inputs()
        prepared, caches = served_model(
            GraphMode.FULL_DECODE_ONLY, inputs if own else None, metadata_of
        )
        step = {k: tensor[:num_tokens] for k, tensor in inputs.items()}
        timed: list[Callable[[], Any]] = [
            partial(served_step, prepared, num_tokens, metadata_of, step),
            _bare_loop(prepared),
        ]
        if own:
            timed.append(_least_step(prepared, step, caches))
        try:
            times = interleaved(timed, rounds, steps * 5)
        finally:
            prepared.close()
        rows.append(row(name, "bare loop", *times[:2]))
        if own and num_tokens == NUM_TOKENS:
            rows.append(row("least step, by hand", "bare loop", times[2], times[1]))
    return rows


def metadata_of_20() -> Any:
    """New metadata of a step, of ten tensors that stay where they are and ten numbers."""
    return FieldsOf20(**_TENSORS, **_VALUES)


def served_inputs() -> dict[str, torch.Tensor]:
    """The inputs of `ServedModel`."""
    integers = ("positions", "slot_mapping", "adapter_ids")
    zeros = {name: torch.zeros(NUM_TOKENS, dtype=torch.int64) for name in integers}
    return {"x": torch.zeros(NUM_TOKENS, HIDDEN), **zeros}


def served_model(
    mode: GraphMode,
    buffers: dict[str, torch.Tensor] | None = None,
    metadata_of: Callable[[], Any] = object,
    **settings: Any,
) -> tuple[PreparedModel, list[torch.Tensor]]:
    """`ServedModel`, captured and sealed, and its watched caches, which the caller keeps. Its
    splitting ops read each field of metadata that has any."""
    caches = [torch.zeros(2, NUM_TOKENS, HIDDEN) for _ in range(LAYERS)]
    config = _config(
        mode,
        x=f"float32[num_tokens, {HIDDEN}]",
        positions="int64[num_tokens]",
        slot_mapping="int64[num_tokens]",
        adapter_ids="int64[num_tokens]",
    )
    config = config.changed(**settings)
    model = ServedModel("idle" if metadata_of is object else "reading")
    prepared = prepare(model, config, backend=IdleBackend(), input_buffers=buffers)
    for layer, cache in enumerate(caches):
        prepared.watch(f"layers.{layer}.cache", cache)
    prepared.capture(lambda *_: metadata_of())
    prepared.seal()
    return prepared, caches


def _least_step(
    prepared: PreparedModel, inputs: dict[str, torch.Tensor], caches: Sequence[torch.Tensor]
) -> Callable[[], object]:
    """The same step by hand, for this one graph: only what each step must do.

    The engine's call with its `Batch`, the calls of torch that check the inputs and two addresses,
    the replay and the new result; no dispatch, forward context, refusals, counters or modes.
    """
    result = torch.zeros(NUM_TOKENS, HIDDEN)
    replay = prepared.recordings()[0][1].replay
    has_form = form_test(tuple(inputs.values()))
    places = tuple(tensor.data_ptr() for tensor in inputs.values())
    one, two = caches[:2]
    first, second = one.data_ptr(), two.data_ptr()

    def checked(*tensors: torch.Tensor) -> torch.Tensor:
        if not has_form(*tensors):
            raise AssertionError
        for tensor, place in zip(tensors, places, strict=True):
            if tensor.data_ptr() != place or not tensor.is_contiguous():
                raise AssertionError
        if one.data_ptr() != first or two.data_ptr() != second:
            raise AssertionError
        replay()
        return result.detach()

    def call(*, batch: Batch, metadata: object, **named: torch.Tensor) -> torch.Tensor:
        return checked(*named.values())

    def step() -> None:
        batch = Batch(num_tokens=NUM_TOKENS, num_reqs=NUM_TOKENS, is_decode=True, query_len=1)
        call(**inputs, batch=batch, metadata=None)

    return step


def served_step(
    prepared: PreparedModel,
    num_tokens: int,
    metadata_of: Callable[[], Any],
    inputs: dict[str, torch.Tensor],
) -> None:
    """One step as an engine runs it; the result is dropped, as after sampling."""
    metadata = metadata_of()
    batch = Batch(num_tokens=num_tokens, num_reqs=num_tokens, is_decode=True, query_len=1)
    prepared(**inputs, batch=batch, metadata=metadata)


def _config(mode: GraphMode, **inputs: str) -> Config:
    return Config(
        splitting_ops=("piecegraph_bench::idle", "piecegraph_bench::reading"),
        inputs=inputs,
        max_num_tokens=NUM_TOKENS,
        max_num_reqs=NUM_TOKENS,
        capture_sizes=(NUM_TOKENS,),
        graph_mode=mode,
        attention={"support": "ALWAYS"},
        compiler="eager",
        cache=False,
    )


def _prepared(mode: GraphMode, buffers: dict[str, torch.Tensor] | None = None) -> PreparedModel:
    config = _config(mode, x=f"float32[num_tokens, {HIDDEN}]")
    prepared = prepare(IdleModel(), config, backend=IdleBackend(), input_buffers=buffers)
    prepared.capture()
    prepared.seal()
    return prepared


def _step(prepared: PreparedModel, mode: RuntimeMode, x: torch.Tensor) -> Callable[[], Any]:
    """One step as an engine runs it, through dispatch."""
    batch = Batch(num_tokens=NUM_TOKENS, num_reqs=NUM_TOKENS, is_decode=True, query_len=1)
    assert prepared.dispatch(batch).mode is mode
    return lambda: prepared.run(prepared.dispatch(batch), x)


def _bare_loop(prepared: PreparedModel) -> Callable[[], Any]:
    ((_, recording),) = prepared.recordings()
    calls = recording.calls

    def loop() -> None:
        for call in calls:
            call()

    return loop
