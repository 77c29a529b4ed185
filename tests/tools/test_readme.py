"""The README is correct: its commands run. Its examples: tests/test_examples.py."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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
    done = subprocess.run(
        arguments,
        capture_output=True,
        text=True,
        env=environment,
        cwd=ROOT if benchmark else tmp_path,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("command", TARGETS)
def test_a_make_target_exists_and_its_recipe_can_be_expanded(command):
    """The targets themselves run this suite; here they are only looked at."""
    if shutil.which("make") is None:
        pytest.fail("make is missing")
    done = subprocess.run([*command.split(), "--dry-run"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_every_link_to_a_file_leads_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    files = [link for link in links if "://" not in link]
    assert files
    assert [link for link in files if not (ROOT / link).exists()] == []
