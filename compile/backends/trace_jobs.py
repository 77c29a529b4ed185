"""The jobs of one trace: their graphs and options, and what a finished job leaves behind.

Code is found again by the key of its job. It is stored once its guards are proved.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import sympy
import torch
from torch.fx import GraphModule

from ...cache import Entry
from ...cache.keys.factors import Json
from ...errors import PieceFailed, PiecegraphError
from ...events import Events
from ...torch_compat.basics.devices import runs_triton
from ...torch_compat.basics.symbolic import Located
from ...torch_compat.compiling.partition import partition_options
from ..guards.numerics_check import numeric_difference
from ..ir.compilation import Blobs, Compiler, CompileRequest, PieceBuilt, PieceFn, kernels
from ..ir.locations import first_line
from ..passes.graph_pass import inductor_passes
from ..plan.split_model import SplitModel
from .schedule import Job


@dataclass(frozen=True)
class CompiledJob:
    """A finished job. It may be stored if all its guards are `proved` for the served ranges."""

    fn: PieceFn
    blobs: Blobs
    proved: bool
    seconds: float
    """Compile time, of this process or of the one that stored it."""


@dataclass(frozen=True)
class TraceJobs:
    """What the jobs of one trace of a model have in common."""

    request: CompileRequest
    split: SplitModel
    compiler: Compiler

    def graph(self, job: Job) -> GraphModule:
        """A new copy of the graph of a job's piece."""
        return job.unique.piece.module(self.split.trace.graph)

    def stored(self, job: Job) -> CompiledJob | None:
        """The stored artifact of a job, if there is one that was proved for the served ranges."""
        if self.compiler.load is None or job.key is None:
            return None
        entry = self.request.cache.lookup("artifact", job.key)
        self.request.record_lookup("artifact", job.key, entry)
        if not isinstance(entry, Entry) or not _covers(entry.meta.get("ranges"), job.served):
            return None
        try:
            (fn,) = self.compiler.load([entry.contents])
        except Exception as error:  # code of another system or compiler
            reason = f"it cannot be loaded: {type(error).__name__}: {error}"
            facts = {"piece": job.unique.index, "reason": reason}
            self.request.events.emit("artifact.refused", level=logging.WARNING, **facts)
            return None
        seconds = entry.meta.get("compile_seconds")
        seconds = float(seconds) if isinstance(seconds, (int, float)) else 0.0
        return CompiledJob(fn, entry.contents, proved=True, seconds=seconds)

    def prove(self, job: Job, load: Callable[[], PieceFn], added: Sequence[Located] = ()) -> bool:
        """Prove the guards that the compiler added, where it helps by running the compiled code.

        A worker added the guards `added`. Raises GuardUnproved.
        """
        cut_at = self.split.config.code.cut_at

        def run(sizes: Mapping[sympy.Symbol, int]) -> str | None:
            return numeric_difference(load(), self.graph(job), sizes, cut_at)

        guards = self.split.guards_of(job.unique)
        return guards.prove_new(f"piece {job.unique.index}", run=run, added=added)

    def keep(self, job: Job, blobs: Blobs, proved: bool, seconds: float, **facts: Any) -> None:
        """Record and store what was compiled. Raises SettingsChanged."""
        request, piece = self.request, job.unique.index
        built = PieceBuilt(piece, seconds, kernels([blobs])[0])
        request.records.pieces.append(built)
        facts = {**job.facts(), **facts, "seconds": seconds, "kernels": built.kernels}
        request.events.emit("compile.end", level=logging.INFO, **facts)
        request.events.count(f"{self.compiler.name}_compiles")
        request.progress(f"compiled piece {piece}")
        obstacle = _obstacle(job, blobs, proved)
        if obstacle is None:
            store_artifact(request, job, blobs, seconds)
        elif self.compiler.load is not None:
            request.events.emit("artifact.not_kept", piece=piece, reason=obstacle)

    def failure(self, job: Job, reason: str) -> PieceFailed:
        """The error of a job that the compiler could not do."""
        return PieceFailed(compiler=self.compiler.name, **job.names(), reason=reason)

    @contextmanager
    def naming(self, job: Job) -> Iterator[None]:
        """Convert errors of the compiler to PieceFailed, which names the piece."""
        try:
            yield
        except PiecegraphError:
            raise
        except Exception as error:
            raise self.failure(job, f"{type(error).__name__}: {first_line(error)}") from error


def store_artifact(request: CompileRequest, job: Job, blobs: Blobs, seconds: float) -> None:
    """Store the proved artifact of a job, if it has a key, with the ranges of its guards.

    Raises SettingsChanged.
    """
    request.check_state()
    if job.key is not None:
        meta: dict[str, Json] = {"compile_seconds": seconds, "ranges": job.served}
        request.publish("artifact", job.key, meta, blobs)


def compiler_options(
    split: SplitModel, job: Job, device: torch.device, events: Events
) -> dict[str, Any]:
    """`plain_options` and passes."""
    passes = inductor_passes(job.passes, partial(events.emit, "pass"), job.unique.index)
    return {**plain_options(split, job, device), **passes}


def plain_options(split: SplitModel, job: Job, device: torch.device) -> dict[str, Any]:
    """Inductor's options for a job: autotuning for one size at level 3, the user's, and where it
    partitions its code."""
    tunes = split.config.code.autotune and runs_triton(device)
    tuned = {"max_autotune": True} if tunes and job.size is not None else {}
    code = split.config.code
    return {**tuned, **code.inductor_options, **partition_options(code.cut_at)}


def _obstacle(job: Job, blobs: Blobs, proved: bool) -> str | None:
    """Why the artifact of a job is not stored; None if it is."""
    if job.key is None:
        return job.unique.obstacle or "a setting or a pass has no description"
    if not blobs:
        return "the compiler cannot serialize it"
    return None if proved else "it holds for a part of the sizes only"


def _covers(proved: Any, served: Sequence[Any]) -> bool:
    """Whether the ranges proved for an artifact contain the served ranges."""
    return (
        isinstance(proved, list)
        and len(proved) == len(served)
        and all(
            isinstance(span, list) and span[0] <= low and high <= span[1]
            for span, (low, high) in zip(proved, served, strict=True)
        )
    )
