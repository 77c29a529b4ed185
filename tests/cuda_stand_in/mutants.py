"""Remove one protection of the cuda backend at a time: a test must fail for each, and where the
first hour has a measurement of it, that one, too.

`python mutants.py [TEXT]` in the environment of `make cuda-test`; TEXT selects some. A
mutant that something does not notice is printed, and the exit status is 1.
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
    tests: str = ""
    """The file of the tests that must notice it."""
    step: str = ""
    """The measurement of `benchmarks.on_device` that must notice it."""
    before: tuple[int, int] = (99, 0)
    """The torch version from which on torch itself does what the protection does."""

    def runs(self) -> list[tuple[str, str]]:
        """What must notice it, as `(tests, step)`, one of them empty."""
        return [each for each in ((self.tests, ""), ("", self.step)) if any(each)]


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


def command_of(tests: str, step: str) -> tuple[list[str], dict[str, str]]:
    """What runs a file of tests, or a measurement, and the variables that it needs."""
    if step:
        values = {"STAND_IN_VALUES": "1", "TRITON_INTERPRET": "1"}
        return ["benchmarks.on_device", step, "--small"], values
    options = ["-p", "tests.cuda_stand_in.plugin", "-m", "gpu and not slow", "-qx", "-W", "default"]
    return ["pytest", *options, "-p", "no:cacheprovider", tests], {"STAND_IN_DEVICES": "2"}


def passes(folder: Path, tests: str, step: str) -> bool:
    run = [sys.executable, str(folder / HERE.relative_to(ROOT) / "run.py"), "-m"]
    command, variables = command_of(tests, step)
    environment = os.environ | variables | {"PYTHONPATH": str(folder / ".typing")}
    try:
        done = subprocess.run(
            [*run, *command], cwd=folder, env=environment, capture_output=True, timeout=900
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
        for run in sorted({run for mutant in chosen for run in mutant.runs()}):
            if not passes(folder, *run):
                print(f"{' '.join(run).strip()} fails without a mutant")
                return 1
        for mutant in chosen:
            path = folder / mutant.file
            source = path.read_text()
            if source.count(mutant.old) < 1:
                print(f"not found in {mutant.file}: {mutant.old!r}")
                return 1
            path.write_text(source.replace(mutant.old, mutant.new, 1))
            blind = [tests or step for tests, step in mutant.runs() if passes(folder, tests, step)]
            path.write_text(source)
            noticed = f"SURVIVED {', '.join(blind)}:" if blind else "noticed "
            print(f"{noticed}  {mutant.what}", flush=True)
            survivors += [mutant.what] * bool(blind)
    print(f"torch {torch.__version__}: {len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
