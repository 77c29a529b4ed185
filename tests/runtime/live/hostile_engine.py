"""An engine that does not hold still: a thread that compiles, traces, exports, forks and imports.

What it changes in the process it changes back. What breaks an engine that does it beside its own
steps (another default dtype, `torch.fx`, which replaces `Module.__call__`, or a parse beside one of
pytest's) it does while the test waits for the thread that traces, and nothing beside a `prepare`.
"""

import ast
import importlib
import inspect
import os
import random
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext

import torch

LAZY = (
    *("torch.distributions.kl", "torch.nn.utils.prune", "torch.utils.mobile_optimizer"),
    *("torch.ao.ns.fx.utils", "torch.onnx.ops", "torch.utils.benchmark", "wave", "colorsys"),
)


MOST_DISTURBED = 3
"""How often in a test it does each thing that a trace has to be repeated for: on a machine where a
trace takes as long as the engine rests, there would be no end, and there are twelve tries."""


class Cycle:
    """Garbage whose finalizer lets another thread run."""

    def __init__(self):
        self.me = self

    def __del__(self):
        time.sleep(0)


class HostileEngine:
    """`errors` are those of its own calls, `ran` how often it did what."""

    def __init__(self):
        self.ran = Counter()
        self.errors = []
        self._ends = threading.Event()
        self._waiting, self._turn = threading.Event(), threading.Lock()
        self._linear, self._x = torch.nn.Linear(4, 4), torch.ones(2, 4)
        self._compiled = torch.compile(torch.neg, backend="eager")
        self._source = inspect.getsource(ast)
        self._calls = (
            self.traces_with_fx, self.exports, self.compiles, self.changes_the_default_dtype,
            self.parses, self.forks, self.imports, self.trains_under_autocast, self.runs_no_grad,
            self.runs_what_it_compiled,
        )  # fmt: skip
        self._disturbing = self.changes_the_default_dtype, self.parses, self.traces_with_fx
        self._while_waiting = *self._disturbing, self.exports
        self._thread = threading.Thread(target=self._run, name="hostile-engine", daemon=True)

    @property
    def turn(self):
        """No call of its own is under way inside. A child that was forked has no engine."""
        return self._turn if self._thread.is_alive() else nullcontext()

    @contextmanager
    def running(self):
        self._thread.start()
        try:
            yield
        finally:
            self._ends.set()
            self._thread.join(300)
            assert not self._thread.is_alive(), f"it hangs after {dict(self.ran)}"

    @contextmanager
    def test_waits(self):
        """The test runs no step of its own inside."""
        self._waiting.set()
        try:
            yield
        finally:
            self._waiting.clear()
            with self.turn:  # all is as before
                pass

    def _run(self):
        while not self._ends.wait(random.uniform(0, 0.05)):
            call = random.choice(self._calls)
            if call in self._disturbing and self.ran[call.__name__] == MOST_DISTURBED:
                continue
            try:
                with self.turn:
                    if self._waiting.is_set() or call not in self._while_waiting:
                        call()
                        self.ran[call.__name__] += 1
            except Exception as error:
                self.errors.append(f"{call.__name__}: {type(error).__name__}: {error}")

    def traces_with_fx(self):
        torch.fx.symbolic_trace(self._linear)

    def exports(self):
        torch.export.export(self._linear, (self._x,))

    def compiles(self):
        torch.compile(lambda x: x + 1, backend="eager")(self._x)

    def runs_what_it_compiled(self):
        self._compiled(self._x)

    def changes_the_default_dtype(self):
        torch.set_default_dtype(torch.bfloat16)
        try:
            time.sleep(random.uniform(0, 0.05))
        finally:
            torch.set_default_dtype(torch.float32)

    def parses(self):
        for _ in range(20):
            Cycle()
        ast.parse(self._source)

    def forks(self):
        if not (child := os.fork()):
            os._exit(0)
        os.waitpid(child, 0)

    def imports(self):
        name = random.choice(LAZY)
        importlib.import_module(name)
        if not name.startswith("torch"):
            del sys.modules[name]

    def trains_under_autocast(self):
        with torch.autocast("cpu"):
            loss = self._linear(self._x).sum()
        torch.autograd.grad(loss, [*self._linear.parameters()])

    def runs_no_grad(self):
        with torch.no_grad(), torch.device("cpu"):
            self._linear(self._x)
