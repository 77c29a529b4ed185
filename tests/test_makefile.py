"""What the Makefile installs and how CI ends, with a pip and a make that only pretend."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

FAKE = """#!/bin/sh
echo "$@" >> "$CALLS"
case "$*" in
  "-m venv"*) for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; cp "$0" "$last/bin/piecegraph" ;;
  *pip*"$MISSING"*) exit 1 ;;
esac
"""  # noqa: E501


def run_make(directory, missing, *arguments):
    """Status, output and commands of `make` where pip lacks what contains `missing`."""
    shutil.copy(ROOT / "Makefile", directory)
    (directory / "pyproject.toml").touch()
    fake, calls = directory / "fake-python", directory / "calls"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    environ = {**os.environ, "CALLS": str(calls), "MISSING": missing}
    for name in ("MAKEFLAGS", "TORCH", "PYTHON"):
        environ.pop(name, None)
    done = subprocess.run(
        ["make", f"PYTHON={fake}", *arguments],
        cwd=directory, env=environ, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr, calls.read_text().splitlines()


def torches(calls):
    return [call.rpartition(" ")[2] for call in calls if ".[cli]" in call]


def test_a_run_takes_the_cpu_build_where_there_is_one(tmp_path):
    status, output, calls = run_make(tmp_path, "nothing", "run")
    assert status == 0, output
    assert torches(calls) == ["torch==2.13.0+cpu"]
    assert calls[-1] == "run"


def test_a_run_without_that_wheel_says_so_and_takes_what_pip_has(tmp_path):
    status, output, calls = run_make(tmp_path, "torch==2.13.0+cpu", "run")
    assert status == 0, output
    assert "trying TORCH=torch" in output
    assert torches(calls) == ["torch==2.13.0+cpu", "torch"]
    assert calls[-1] == "run"


def test_a_torch_that_the_user_names_is_not_replaced(tmp_path):
    status, _, calls = run_make(tmp_path, "torch==9", "TORCH=torch==9", "run")
    assert status != 0
    assert torches(calls) == ["torch==9"]


def test_contributors_get_the_same_torch(tmp_path):
    status, output, calls = run_make(tmp_path, "torch==2.13.0+cpu", ".venv/.dev")
    assert status == 0, output
    assert calls[-1].endswith(".[dev]")


@pytest.mark.parametrize("broken", ["", "lint", "unit", "heavy"])
def test_ci_ends_with_what_ran_and_has_the_status_of_lint_and_unit(tmp_path, broken):
    for name, text in (
        ("make", f'for last; do :; done; test "$last" != "{broken}"'),
        ("chromium", ""),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([tmp_path / ".ci/run"], env=environ, capture_output=True, text=True)
    decides = broken in ("lint", "unit")
    assert (done.returncode != 0) == decides, done.stderr
    table = [line.split()[2:4] for line in done.stdout.rpartition("\n\n")[2].splitlines()]
    stages = ["lint", "unit"] if decides else ["lint", "unit", "test-hostile", "heavy"]
    ended = {name: end for name, end in table if name in stages}
    assert ended == {name: "***" if name == broken else "passed" for name in stages}
