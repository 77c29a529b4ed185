"""Data-parallel ranks of `piecegraph run`, which torchrun starts: each serves some requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...errors import InvalidSetting
from ..report.sections import ReportSection, Table, columns

if TYPE_CHECKING:
    from ... import Ranks
    from .options import RunOptions

TIMEOUT_S = 600.0
"""Ranks may start at different speeds; torchrun notices one that has ended at once."""


def launched_rank() -> int | None:
    """The rank of this process; None if torchrun has not started it."""
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def of_rank(options: RunOptions) -> RunOptions:
    """The options of this rank: with `--device cuda` each has a device of its own.

    Raises InvalidSetting for what cannot be served by several ranks.
    """
    if launched_rank() is None:
        return options
    if options.buckets:
        reason = "the engine that it starts runs no steps without requests, as ranks do"
        value = str(options.buckets)
        raise InvalidSetting(name="--buckets", value=value, reason=reason, expected="one process")
    own = options.device == "cuda"
    return replace(options, device=f"cuda:{os.environ['LOCAL_RANK']}") if own else options


@contextmanager
def joined_ranks() -> Iterator[Ranks | None]:
    """All ranks that torchrun has started, seen from this one; None without torchrun."""
    if launched_rank() is None:
        yield None
        return
    import torch.distributed as dist

    from ... import Ranks

    dist.init_process_group("gloo")
    try:
        yield Ranks(timeout_s=TIMEOUT_S)
    finally:
        dist.destroy_process_group()


def rank_facts(report: dict[str, Any]) -> dict[str, Any]:
    """What the report of all ranks states of one."""
    background, startup = report["background"], report["startup"]
    return {
        "requests": report["serving"]["requests"],
        "steps": report["serving"]["steps"],
        "first_answer_seconds": startup["first_answer_seconds"],
        "verification": report["verification"],
        "switch": background and background["switch"],
    }


def ranks_section(ranks: list[dict[str, Any]]) -> ReportSection:
    """One line for each rank."""
    rows = [
        (
            str(rank),
            str(of["requests"]),
            str(of["steps"]),
            f"{of['first_answer_seconds']:.2f}" if of["first_answer_seconds"] else "-",
            f"{of['verification']['steps']} steps" if of["verification"]["ok"] else "FAILED",
            f"{of['verification']['max_abs_diff']:.2g}",
            str(of["switch"]["steps"]) if of["switch"] else "-",
        )
        for rank, of in enumerate(ranks)
    ]
    names = "rank", "requests", "steps", "first answer, s", "verified", "difference", "switch after"
    return ReportSection("Ranks", [Table(rows, columns(*names))])
