"""Recorded texts are those of this code, byte for byte; see `record.py`.

A digest that changes makes every user compile again: a change that must do so records them again.
"""

from __future__ import annotations

import difflib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("decisions.json", "plans.json", "digests.json", "runs.json", "exchanges.txt")
"""What is recorded again and compared here; `conditions.txt` is by the tests of conditions."""
TRACED_BY = "2.13."
"""Torch version of all goldens but the decisions: they hold its graphs and names of its ops."""
SHOWN = 100
"""Lines of a difference that are printed."""

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def recorded_now(*names: str) -> dict[str, str]:
    """What `record` would write into these files, made in a process of its own."""
    environment = {**os.environ, "PIECEGRAPH_OFF": ""}
    run = subprocess.run(
        [sys.executable, "-m", "tests.goldens.record", *names],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    texts: dict[str, str] = json.loads(run.stdout)
    return texts


def expect_equal(name: str, golden: str, text: str) -> None:
    if golden == text:
        return
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), f"tests/goldens/{name}", "now", n=2, lineterm=""
    )
    shown = "\n".join([*lines][:SHOWN])
    command = f"python -m tests.goldens.record --write {name}"
    pytest.fail(f"{name} has changed. If it must:\n{command}\n{shown}", pytrace=False)


def needs_torch(name: str) -> None:
    if not version("torch").startswith(TRACED_BY):
        pytest.skip(f"{name} is of torch {TRACED_BY}x: NOT tested with {version('torch')}")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return recorded_now(*FILES)


@pytest.mark.parametrize("name", FILES)
def test_nothing_differs_from_what_was_recorded(texts, name):
    if name != "decisions.json":
        needs_torch(name)
    expect_equal(name, (HERE / name).read_text(), texts[name])
