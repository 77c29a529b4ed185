"""Dispatch decisions, plans and piece digests equal the recorded ones; see `record.py`.

A digest that changes makes every user compile again: a change that must do so records them again.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRACED_BY = "2.13."
"""Torch version of the recorded plans and digests: they hold its graphs and names of its ops."""

pytestmark = pytest.mark.compile


@pytest.fixture(scope="module")
def actual():
    program = [sys.executable, "-m", "tests.goldens.record"]
    run = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("kind", ["decisions", "plans", "digests"])
def test_nothing_differs_from_what_was_recorded(actual, kind):
    if kind != "decisions" and not version("torch").startswith(TRACED_BY):
        pytest.skip(f"{kind} are of torch {TRACED_BY}x: NOT tested with {version('torch')}")
    expected = json.loads((HERE / f"{kind}.json").read_text())
    assert actual[kind].keys() == expected.keys()
    for name, golden in expected.items():
        assert actual[kind][name] == golden, f"{kind} of {name}"
