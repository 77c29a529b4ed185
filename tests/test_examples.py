"""The programs in examples/ run."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.compile, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(tmp_path):
    """`run("own_model.py", …)`: its output; the cache is a fresh directory."""

    def run(name, *arguments, **variables):
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path / "cache"), **variables}
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=280
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_a_model_with_its_own_attention(run):
    output = run("own_model.py", PIECEGRAPH_OFF="inductor")
    assert "8 steps, equal; the last one ran in mode FULL" in output


@pytest.mark.heavy
def test_a_hugging_face_model(run):
    output = run("hugging_face.py", PIECEGRAPH_OFF="inductor")
    assert "mode PIECEWISE, 8 rows" in output


@pytest.mark.heavy
def test_a_container_starts_warm(run, tmp_path):
    """The image's steps: build, make a layer, and start with an empty private directory."""
    run("container/serve.py", "build")
    layer, private = tmp_path / "image", tmp_path / "private"
    environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "piecegraph", "cache", "layer", str(layer)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    output = run("container/serve.py", "serve", layer, PIECEGRAPH_CACHE_DIR=str(private))
    assert "hit: True traces: 0\ncompiles: 0\n" in output
    assert "Dynamo imported: False" in output


# The tests of this example, as tests of ours.
globals().update(
    (name, value)
    for name, value in runpy.run_path(str(EXAMPLES / "test_capture_modes.py")).items()
    if name.startswith("test_")
)


def test_each_program_is_run_here():
    programs = {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py")}
    assert programs == {
        "own_model.py",
        "hugging_face.py",
        "continuous_batching.py",  # these by tests/engines, in environments of their own
        "vllm_offline.py",
        "container/serve.py",
        "test_capture_modes.py",
    }
