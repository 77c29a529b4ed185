"""Compile jobs in this process, one after the other: torch's standalone compile is not thread-safe.

The code of a piece is generated while the kernels of pieces before it are built.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from ...torch_compat.tracing.dynamo import reasoning_about_sizes
from ..ir.compilation import Building, Built
from ..ir.locations import node_location
from ..pieces.piece import inputs_with_numbers
from .schedule import Job
from .trace_jobs import CompiledJob, TraceJobs, compiler_options

AHEAD = 4
"""Most pieces whose kernels are being built: a killed process has generated them for nothing."""


def compile_here(trace: TraceJobs, jobs: Iterator[tuple[int, Job]]) -> dict[int, CompiledJob]:
    """Compile numbered jobs, if there are any. Raises PieceFailed and the errors of guards.

    What was generated before an error is stored.
    """
    first = next(jobs, None)
    if first is None:
        return {}
    if trace.compiler.first_use is not None:
        trace.compiler.first_use(trace.request.device, trace.request.events)
    results: dict[int, CompiledJob] = {}
    pending = deque[_Generated]()
    with trace.compiler.session():
        try:
            for number, job in chain([first], jobs):
                if len(pending) == AHEAD:
                    pending.popleft().finish(results)
                generated = _Generated(trace, job, number)
                generated.generate()
                pending.append(generated)
        finally:
            with ExitStack() as rest:  # finishes all, also if one fails
                for generated in reversed(pending):
                    rest.callback(generated.finish, results)
    return results


@dataclass
class _Generated:
    """One job: its code is generated, then its kernels are waited for."""

    trace: TraceJobs
    job: Job
    number: int
    seconds: float = 0.0
    """Time of both, once the kernels are built."""
    proved: bool = False
    _building: Building = field(init=False)

    def generate(self) -> None:
        """Generate the code of a copy of the piece, and prove the guards that the compiler adds."""
        job, request, split = self.job, self.trace.request, self.trace.split
        request.check_state()
        events, graph = request.events, self.trace.graph(job)
        where = next(filter(None, map(node_location, graph.graph.nodes)), None)
        with events.trace_unit(*self._unit, where):
            with (
                events.span("compile.piece", **job.names()) as span,
                self.trace.naming(job),
                reasoning_about_sizes(split.config.code.dynamic_shapes.value),
            ):
                events.emit("compile.start", compiler=self.trace.compiler.name, **job.facts())
                options = compiler_options(split, job, request.device, events)
                inputs = inputs_with_numbers(graph, job.numbers)
                self._building = self.trace.compiler.compile(graph, inputs, options)
            self.seconds = span.seconds
            # now: the next piece adds its guards to the same environment
            self.proved = self.trace.prove(job, lambda: self._built[0])

    def finish(self, results: dict[int, CompiledJob]) -> None:
        """Wait until the code can run, record and store it, and add it to `results`."""
        with self.trace.request.events.trace_unit(*self._unit):
            fn, blobs = self._built
            self.trace.keep(self.job, blobs, self.proved, self.seconds)
        results[self.number] = CompiledJob(fn, blobs, self.proved, self.seconds)

    @cached_property
    def _built(self) -> Built:
        job, events = self.job, self.trace.request.events
        with events.span("compile.kernels", piece=job.unique.index) as span, self.trace.naming(job):
            built = self._building()
        self.seconds += span.seconds
        return built

    @property
    def _unit(self) -> tuple[int, str]:
        low, high = self.job.span
        return self.job.unique.index, f"piece {self.job.unique.index}, tokens {low} to {high}"
