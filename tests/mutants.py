"""Remove one protection at a time and see a test fail: `make mutants`, not part of CI.

A mutant that its tests let pass is a protection without a test. They are those of `mutants.toml`,
each made in a copy of the tree. An argument selects those that contain it.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
AT_ONCE = 2
"""Mutants, each in a process of its own."""


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str
    """Options of pytest."""


def mutants() -> list[Mutant]:
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutants"]
    return [Mutant(**each) for each in listed]


def forked(run: Callable[[], int]) -> int:
    """The process id of a copy of this process, whose exit status `run` returns."""
    if child := os.fork():
        return child
    status = 1
    try:
        status = run()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_tests(tree: Path, options: str) -> int:
    output = os.open(tree.parent / "output", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree.parent)
    sys.path[0] = str(tree.parent)
    return pytest.main(["-qx", "-p", "no:cacheprovider", "--assert=plain", *options.split()])


def survives(tree: Path, mutant: Mutant) -> bool:
    """Whether its tests pass with the mutant in `tree`, whose folder is importable."""
    path = tree / mutant.file
    original = path.read_text()
    if mutant.old not in original:
        raise SystemExit(f"{mutant.file} no longer has {mutant.old!r}: correct mutants.toml")
    path.write_text(original.replace(mutant.old, mutant.new, 1))
    status = exit_status(forked(lambda: run_tests(tree, mutant.tests)))
    path.write_text(original)
    if status > 1:  # no test was selected, or none could be collected
        raise SystemExit(f"{mutant.tests}: no test ran\n{(tree.parent / 'output').read_text()}")
    return status == 0


def survivors(chosen: list[Mutant]) -> int:
    """How many of them survive."""
    count = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "piecegraph"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*"))
        for mutant in chosen:
            survived = survives(tree, mutant)
            count += survived
            print("survived" if survived else "caught  ", mutant.file, repr(mutant.old), flush=True)
    return count


def main() -> None:
    # Importing these takes longer than most tests: once here, not in the process of each mutant.
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401

    named = " ".join(sys.argv[1:])
    chosen = [each for each in mutants() if named in " ".join(each)]
    shares = [chosen[first::AT_ONCE] for first in range(AT_ONCE)]
    children = [forked(lambda each=each: survivors(each)) for each in shares]
    raise SystemExit(sum(map(exit_status, children)))


if __name__ == "__main__":
    main()
