"""Which jobs compile a model: each unique piece, for every range that needs code of its own.

Data only: nothing is compiled, loaded or stored here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from ...cache import Key
from ...cache.keys.factors import Json
from ..bundle.key_factors import codegen_key, machine_key
from ..conditions.values import Undescribable
from ..ir.config import TOKENS, GraphPass
from ..passes.graph_pass import passes_up_to
from ..pieces.compile_ranges import CompileRange, compile_ranges
from ..plan.split_model import SplitModel, UniquePiece


@dataclass(frozen=True)
class Job:
    """One unique piece to compile for one range. `size` is set for a static compile size."""

    unique: UniquePiece
    interval: CompileRange
    passes: tuple[GraphPass, ...]
    size: int | None
    key: Key | None
    """None for what has no description: it is not stored."""
    served: list[Json]
    """The served range of each symbol of the piece, by first appearance."""
    numbers: list[int | None]
    """Of each symbol the number that it has in this code, None if it is any that is served."""

    @property
    def span(self) -> tuple[int, int]:
        """The token counts that the code is for, inclusive."""
        return self.size or self.interval.low, self.size or self.interval.high

    def names(self) -> dict[str, Any]:
        """The piece, as events name it."""
        return {"piece": self.unique.index, "digest": self.unique.digest[:12]}

    def facts(self) -> dict[str, Any]:
        """The piece and its range, as events state them."""
        return {**self.names(), "range": list(self.span)}


@dataclass(frozen=True)
class Schedule:
    """The distinct jobs, and for each range the numbers of the jobs that serve it."""

    jobs: list[Job]
    ranges: list[tuple[CompileRange, tuple[int, ...]]]
    machine: Key | None
    """What the keys of all jobs have in common."""


def schedule(split: SplitModel, device: torch.device) -> Schedule:
    """The jobs of a model in the order of its pieces, range by range."""
    try:
        machine = machine_key(split.config.code, device)
    except Undescribable:
        machine = None
    jobs: dict[Any, tuple[int, Job]] = {}
    ranges = []
    for interval in compile_ranges(split.config):
        numbers = []
        for job in _jobs(split, interval, machine):
            identity = (job.unique.index, job.size, tuple(each.name for each in job.passes))
            numbers.append(jobs.setdefault(identity, (len(jobs), job))[0])
        ranges.append((interval, tuple(numbers)))
    return Schedule([job for _, job in jobs.values()], ranges, machine)


def _jobs(split: SplitModel, interval: CompileRange, machine: Key | None) -> Iterator[Job]:
    """A job for each unique piece; without dynamic sizes a piece has one job for all ranges."""
    for unique in split.unique:
        limits = split.guards_of(unique).limits()
        symbols = unique.piece.symbols()
        labels = [str(split.guards.label(symbol)) for symbol in symbols]
        passes = passes_up_to(split.config.passes, interval.high if symbols else None)
        size = interval.low if interval.exact and labels == [TOKENS] else None
        served = [limits[symbol] for symbol in symbols]
        fixed = [low if low == high else None for low, high in served]
        key = None
        if machine is not None and unique.obstacle is None:
            with suppress(Undescribable):  # of a pass
                key = codegen_key(machine, unique.digest, passes, size, fixed)
        ranges: list[Json] = [list(each) for each in served]
        numbers = [size or number for number in fixed]
        yield Job(unique, interval, passes, size, key, ranges, numbers)
