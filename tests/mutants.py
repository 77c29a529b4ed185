"""Remove one protection at a time and see a test fail: `make mutants`, not part of CI.

A mutant that its tests let pass is a protection without a test. They are those of `mutants.toml`,
made in a copy of the tree. An argument selects those that contain it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutant(NamedTuple):
    file: str
    old: str
    new: str
    tests: str
    """Options of pytest."""


def mutants() -> list[Mutant]:
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutants"]
    return [Mutant(**each) for each in listed]


def survives(tree: Path, mutant: Mutant) -> bool:
    """Whether its tests pass with the mutant in `tree`, whose folder is importable."""
    path = tree / mutant.file
    original = path.read_text()
    if original.count(mutant.old) < 1:
        raise SystemExit(f"{mutant.file} no longer has {mutant.old!r}: correct mutants.toml")
    path.write_text(original.replace(mutant.old, mutant.new, 1))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(tree.parent)}
    done = subprocess.run(
        [*command, *mutant.tests.split()], cwd=tree, env=environment, capture_output=True, text=True
    )
    path.write_text(original)
    if done.returncode > 1:  # no test was selected, or none could be collected
        raise SystemExit(f"{mutant.tests}: no test ran\n{done.stdout}")
    return done.returncode == 0


def main() -> None:
    survivors, only = [], " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "piecegraph"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(".*"))
        for mutant in mutants():
            if only not in " ".join(mutant):
                continue
            survived = survives(tree, mutant)
            survivors += [mutant] if survived else []
            print("survived" if survived else "caught  ", mutant.file, repr(mutant.old), flush=True)
    raise SystemExit(len(survivors))


if __name__ == "__main__":
    main()
