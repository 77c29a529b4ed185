"""The README is correct: its commands run. Its examples: tests/test_examples.py."""

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

import pytest

from piecegraph.tools.serve.trace import EXCERPT, read_trace
from tests.processes import output_of

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


COMMANDS = [
    line.removeprefix("$ ")
    for block in blocks("console")
    for line in block.splitlines()
    if line.startswith("$ ")
]
OURS = [
    command for command in COMMANDS if command.startswith(("piecegraph ", "python -m benchmarks "))
]
TARGETS = [command for command in COMMANDS if command.startswith("make ")]


@pytest.fixture
def environment(tmp_path_factory):
    """The surroundings of a command; all of them share one cache, as on a user's machine."""
    home = tmp_path_factory.getbasetemp() / "readme-home"
    home.mkdir(exist_ok=True)
    return {**os.environ, "XDG_CACHE_HOME": str(home), "HOME": str(home)}


def test_every_command_is_one_we_know_how_to_run():
    assert len(OURS) >= 3
    assert len(TARGETS) >= 2
    assert set(COMMANDS) == {*OURS, *TARGETS, ". .venv/bin/activate"}


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.heavy
@pytest.mark.parametrize("command", OURS)
def test_a_command_succeeds(command, environment, tmp_path):
    benchmark = command.startswith("python -m ")
    arguments = [sys.executable, "-m", *shlex.split(command.removeprefix("python -m "))]
    folder = ROOT if benchmark else tmp_path
    assert output_of(*arguments, env=environment, cwd=folder, timeout=280)


@pytest.mark.parametrize("command", TARGETS)
def test_a_make_target_exists_and_its_recipe_can_be_expanded(command):
    """The targets themselves run this suite; here they are only looked at."""
    if shutil.which("make") is None:
        pytest.fail("make is missing")
    assert output_of(*command.split(), "--dry-run", cwd=ROOT)


def test_the_numbers_of_versions_contracts_and_requests_are_those_of_the_project():
    """Those of starts come from a recorded result: docs/generate.py."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    low, beyond = re.findall(r"3\.(\d+)", project["project"]["requires-python"])
    assert f"Python 3.{low} to 3.{int(beyond) - 1}," in README
    torch = next(each for each in project["project"]["dependencies"] if each.startswith("torch>"))
    low, beyond = re.findall(r"2\.(\d+)", torch)
    assert f"- torch 2.{low} to 2.{int(beyond) - 1}." in README
    contracts = len(project["tool"]["importlinter"]["contracts"])
    assert f"`Contracts: {contracts} kept, 0 broken.`" in README
    rows = read_trace(EXCERPT, limit=64, length_scale=0.05)
    prompts, answers = (
        sum(getattr(row, name) for row in rows) for name in ("num_prompt", "num_generate")
    )
    assert f"served {len(rows)} requests ({prompts} prompt tokens, {answers} generated)" in README
