"""Programs and functions that a test runs in processes and threads of their own."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PYTHON = sys.executable


def output_of(*command: object, **options: Any) -> str:
    """What a command prints, which must succeed."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr[-3000:] or done.stdout[-3000:]
    return done.stdout


def at_once(function: Callable[[Any], Any], items: Collection[Any]) -> list[Any]:
    """The result for each item, of threads that run at the same time; an error is raised here."""
    with ThreadPoolExecutor(len(items)) as pool:
        return [*pool.map(function, items)]


def two_ranks(function: Callable[..., object], *args: object) -> None:
    """`function(rank, *args)` in two forks, which must succeed."""
    fork = multiprocessing.get_context("fork").Process
    ranks = [fork(target=function, args=(rank, *args)) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def in_a_thread(function: Callable[[], Any]) -> Any:
    """What another thread gets of it; an error is raised here."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()
