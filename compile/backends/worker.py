"""Compiles one piece that was sent as bytes, in any process that has this library.

Such a process needs no model, no weights and no module of the program. `compile_task` is what any
executor runs. `main` is a worker process of our own pool: it was started by exec, has inherited
nothing but a pipe, reads calls from it, and ends when the process that started it ends, in whatever
way.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from ...cache import Key
from ...cache.keys.key import diff
from ...events import Events
from ...torch_compat.basics.patch import compiler_lock
from ...torch_compat.basics.settings import ProcessState
from ...torch_compat.basics.symbolic import (
    Located,
    deferred_asserts,
    narrowed_range,
    number_of_guards,
    shape_guards,
)
from ...torch_compat.compiling.piece_data import inputs_mode, load_piece
from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..bundle.key_factors import machine_key
from ..guards.prover import Ranges
from ..ir.compilation import LIBRARY, Blobs, Compiler
from ..ir.config import CodeConfig, DynamicShapes
from ..ir.locations import first_line
from ..passes.graph_pass import SHIPPED, inductor_passes
from ..pieces.piece import example_values, inputs_with_numbers, symbols_of
from .aoti import build_library
from .registry import compiler_named

ALIVE_SECONDS = 1.0
"""How often a worker says that it is alive."""


@dataclass(frozen=True)
class Machine:
    """What code is generated for, and by what. `state` makes a process equal to the one that asks;
    one whose own key still differs from `key` refuses."""

    compiler: str
    state: ProcessState
    code: CodeConfig
    device: torch.device
    key: Key


@dataclass(frozen=True)
class Task:
    """One unique piece to compile."""

    piece: int
    graph: bytes
    machine: Machine
    passes: tuple[str, ...]
    numbers: tuple[int | None, ...] = ()
    """Of its symbols, by first appearance; None for one that is any size."""
    limits: Ranges | None = None
    """Set where an ahead-of-time library for these ranges is built."""


@dataclass(frozen=True)
class CompiledPiece:
    """The artifact of a piece, the guards that the compiler added, what its passes reported."""

    blobs: Blobs
    guards: list[Located]
    began: float
    """By `time.perf_counter`, which all processes of a machine share."""
    seconds: float
    passes: list[dict[str, Any]]


@dataclass(frozen=True)
class Refused:
    """Why a piece must be compiled by the process that traced it."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """An error of the compiler, as `Type: message`, and its traceback."""

    reason: str
    details: str


Reply = CompiledPiece | Refused | Failed


def compile_task(data: bytes) -> Reply:
    """Compile a pickled `Task`. Settings of torch are as before afterwards."""
    task: Task = pickle.loads(data)
    machine = task.machine
    with compiler_lock(), machine.state.installed():
        own = machine_key(machine.code, machine.device)
        if difference := diff(machine.key.factors, own.factors):
            return Refused("another process: " + "; ".join(map(str, difference[:3])))
        try:
            graph, options = load_piece(task.graph)
        except Exception as error:  # an op that only the program registers
            return Refused(f"{type(error).__name__}: {first_line(error)}")
        compiler = compiler_named(machine.compiler)
        try:
            with compiler.session():
                return _compile(compiler, task, graph, options)
        except Exception as error:
            return Failed(f"{type(error).__name__}: {first_line(error)}", traceback.format_exc())


def get_ready(compiler: str, device: torch.device, nice: int) -> None:
    """What a worker of our own pool does first."""
    os.nice(nice)
    if (first_use := compiler_named(compiler).first_use) is not None:
        first_use(device, Events())


def main() -> None:
    """Run calls until the pipe, which is the standard input, ends."""
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError, ValueError):  # of the C library
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    connection = Connection(os.dup(0))
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # the compilers that it starts have no pipe
    calls: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    sending = threading.Lock()

    def send(message: bytes) -> None:
        with sending, suppress(OSError):  # the reader notices the end
            connection.send_bytes(message)

    reader = threading.Thread(target=_read, args=(connection, calls, send), daemon=True)
    reader.start()
    for data in iter(calls.get, None):
        send(pickle.dumps(_called(data)))


def _called(data: bytes) -> tuple[bool, Any]:
    """Whether a pickled call returned, and its result or why not."""
    try:
        fn, args = pickle.loads(data)
        return True, fn(*args)
    except Exception as error:
        return False, f"{type(error).__name__}: {first_line(error)}"


def _read(
    connection: Connection, calls: queue.SimpleQueue[bytes | None], send: Callable[[bytes], None]
) -> None:
    """Receive calls, and end the process and its compilers when the other process ends.

    A fork of that process may keep the pipe open, so its id is watched as well.
    """
    parent = os.getppid()
    with suppress(EOFError, OSError):
        while os.getppid() == parent:
            if connection.poll(ALIVE_SECONDS):
                calls.put(connection.recv_bytes())
            else:
                send(b"")
    calls.put(None)  # an idle worker ends by itself
    time.sleep(ALIVE_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _Values(Interpreter):
    """Computes the values of nodes, which are not sent; torch keeps no artifact without them."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        n.meta.setdefault("example_value", value)
        return value


def _compile(
    compiler: Compiler, task: Task, graph: GraphModule, options: dict[str, Any]
) -> CompiledPiece | Refused:
    machine, ran = task.machine, list[dict[str, Any]]()
    passes = [each for each in SHIPPED if each.name in task.passes]
    options |= inductor_passes(passes, lambda **facts: ran.append(facts), task.piece)
    if task.limits is not None:
        began = time.perf_counter()
        with reasoning_about_sizes(machine.code.dynamic_shapes.value):
            library = build_library(graph, task.limits, machine.device, options)
        return CompiledPiece({LIBRARY: library}, [], began, time.perf_counter() - began, [])
    inputs = example_values(graph.graph)
    env = inputs_mode(graph.graph).shape_env
    symbols, known = symbols_of(inputs), number_of_guards(env)
    began = time.perf_counter()
    with reasoning_about_sizes(machine.code.dynamic_shapes.value):
        with inputs_mode(graph.graph):
            _Values(graph).run(*inputs)
        inputs = inputs_with_numbers(graph, task.numbers)
        _, blobs = compiler.compile(graph, inputs, options)()
    if not blobs:
        return Refused("the compiler cannot serialize it")
    seconds = time.perf_counter() - began
    guards = shape_guards(env, known)
    if machine.code.dynamic_shapes is DynamicShapes.UNBACKED:
        guards += chain.from_iterable(narrowed_range(env, symbol) for symbol in symbols)
        deferred = ((expression, None) for expression in deferred_asserts(env))
        guards += (each for each in deferred if each[0].free_symbols <= set(symbols))
    return CompiledPiece(blobs, guards, began, seconds, ran)
