"""Remove one protection of the cuda backend at a time: a test must fail for each.

`python mutants.py [TEXT]` in the environment of `make cuda-test`; TEXT selects some. A
mutant that no test notices is printed, and the exit status is 1.
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

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str
    """The file of the tests that must notice it."""
    before: tuple[int, int] = (99, 0)
    """The torch version from which on torch itself does what the protection does."""


def mutants() -> list[Mutant]:
    """Those of `mutants.toml`."""
    listed = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["mutants"]
    return [Mutant(**each) for each in listed]


def copy_of_the_project(folder: Path) -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(HERE / "built", folder / HERE.relative_to(ROOT) / "built", symlinks=True)
    (folder / ".typing").mkdir()
    (folder / ".typing" / "piecegraph").symlink_to("..")


def passes(folder: Path, *tests: str) -> bool:
    run = [sys.executable, str(folder / HERE.relative_to(ROOT) / "run.py"), "-m", "pytest"]
    options = ["-p", "tests.cuda_stand_in.plugin", "-m", "gpu and not slow", "-qx", "-W", "default"]
    environment = os.environ | {"PYTHONPATH": str(folder / ".typing"), "STAND_IN_DEVICES": "2"}
    command = [*run, *options, "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    survivors = []
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    chosen = [each for each in mutants() if version < tuple(each.before) and named in each.what]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_project(folder)
        if not passes(folder, *{mutant.tests for mutant in chosen}):
            print("the tests fail without a mutant")
            return 1
        for mutant in chosen:
            path = folder / mutant.file
            source = path.read_text()
            if source.count(mutant.old) < 1:
                print(f"not found in {mutant.file}: {mutant.old!r}")
                return 1
            path.write_text(source.replace(mutant.old, mutant.new, 1))
            noticed = not passes(folder, mutant.tests)
            path.write_text(source)
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {mutant.what}", flush=True)
            survivors += [] if noticed else [mutant.what]
    print(f"torch {torch.__version__}: {len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
