"""`piecegraph bisect`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..serve.options import RunOptions, writable
from ..serve.run_arguments import with_run_options

WRONG = 1


@with_run_options
def bisect_command(
    options: RunOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run to compare.")] = 12,
    script: Annotated[
        Path | None, typer.Option(help="Write a Python script that repeats a finding.")
    ] = None,
) -> int:
    """Find which part of the library makes a wrong number; status 1 if one does."""
    from rich.console import Console

    from ..bisect.climb import bisect
    from ..bisect.decoder_subject import decoder_subject
    from ..serve.workload import read_requests

    requests = read_requests(options)
    writable("--script", script)
    console = Console(stderr=True)
    subject = decoder_subject(options, requests, steps, console)
    finding = bisect(subject, script=script, say=lambda line: print(line, flush=True))
    sys.stdout.write(f"{finding.line() if finding else 'every rung is right'}\n")
    return WRONG if finding else 0
