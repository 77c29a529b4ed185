"""The main job from its options to its report, timed from the import of torch on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .options import RunOptions

if TYPE_CHECKING:
    from rich.console import Console

    from ... import Events
    from .report import Report
    from .run import Service


@contextmanager
def main_job(
    options: RunOptions, console: Console, events: Events | None = None
) -> Iterator[tuple[Service, Report]]:
    """Serve the trace; gives what served, still up, and the report.

    Raises InvalidSetting for a device that is not there and whatever the library refuses.
    """
    from .workload import read_requests

    requests = read_requests(options)
    began = time.perf_counter()
    from .run import bring_up, serve, service_report

    phases = [("import torch", time.perf_counter() - began)]
    with bring_up(options, requests, phases, console, events) as service:
        serve(service, requests, console)
        yield service, service_report(service, options, requests, phases)
