"""Programs run: those of examples/, the samples of a page of docs/ as one, each of README.md."""

import os
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from tests.processes import output_of
from tests.run_programs import forking

pytestmark = [pytest.mark.compile, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def samples(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


EXPENSIVE = {"debugging.md", "testing-capture-modes.md"}
"""Pages whose samples take seconds; what they show has tests of its own."""
PAGES = [
    pytest.param(page.name, marks=[pytest.mark.heavy] * (page.name in EXPENSIVE))
    for page in sorted((ROOT / "docs").glob("*.md"))
    if samples(page)
]


@pytest.fixture(scope="module")
def run_forked():
    with forking() as run:
        yield run


@pytest.mark.parametrize("name", PAGES)
def test_the_samples_of_a_page_run(run_forked, name, tmp_path):
    blocks = samples(ROOT / "docs" / name)
    if "go on from the model of the [guide]" in " ".join(
        (ROOT / "docs" / name).read_text().split()
    ):
        blocks.insert(0, samples(ROOT / "docs/guide.md")[0])
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    run_forked(script, tmp_path / "output")


@pytest.mark.parametrize("example", samples(ROOT / "README.md"))
def test_an_example_of_the_readme_runs(run_forked, example, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(example)
    places = {"XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    assert "tensor(" in run_forked(script, tmp_path / "output", **places)


def test_a_model_with_its_own_attention(run_forked, tmp_path):
    variables = {"PIECEGRAPH_CACHE_DIR": str(tmp_path / "cache"), "PIECEGRAPH_OFF": "inductor"}
    script = Path(shutil.copy(EXAMPLES / "own_model.py", tmp_path))
    output = run_forked(script, tmp_path / "output", **variables)
    assert "8 steps, equal; the last one ran in mode FULL" in output


def test_the_graphs_of_an_engine_on_one_page(run_forked, tmp_path):
    script = EXAMPLES / "one_page_runner.py"
    assert len(script.read_text().splitlines()) <= 150
    output = run_forked(script, tmp_path / "output")
    assert "5 requests, batched and alone: equal tokens" in output
    assert {line.split(":")[0] for line in output.splitlines() if line.startswith("FULL")} == {
        "FULL 1", "FULL 2", "FULL 4", "FULL 8",
    }  # fmt: skip
    assert "NONE" not in output


@pytest.fixture
def run(tmp_path):
    """`run("hugging_face.py", …)`: its output; the cache is a fresh directory."""

    def run(name, *arguments, **variables):
        command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
        environment = {**os.environ, "PIECEGRAPH_CACHE_DIR": str(tmp_path / "cache"), **variables}
        return output_of(*command, env=environment, cwd=tmp_path, timeout=280)

    return run


@pytest.mark.heavy
def test_a_hugging_face_model(run):
    output = run("hugging_face.py", PIECEGRAPH_OFF="inductor")
    assert "mode PIECEWISE, 8 rows" in output


@pytest.mark.heavy
def test_a_model_with_ids_and_embeddings(run):
    cold, warm = (run("embeddings.py") for _ in range(2))
    assert "steps in PIECEWISE 8, PIECEWISE 8" in cold
    assert "2 traces, 4 unique pieces of 8" in cold
    assert "0 traces, 4 unique pieces of 8" in warm


@pytest.mark.heavy
def test_a_model_is_compiled_while_its_weights_load(run):
    assert "after the last of them, from the cache" in run("load_and_compile.py")


@pytest.mark.heavy
def test_a_container_starts_warm(run, tmp_path):
    """The image's steps: build, and start with an empty private directory."""
    layer, private = tmp_path / "image", tmp_path / "private"
    run("container/serve.py", "build", layer)
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
        "one_page_runner.py",
        "plain_runner.py",  # by tests/cuda_stand_in: it needs a device
        "embeddings.py",
        "hugging_face.py",
        "load_and_compile.py",
        "demo.py",  # by `make demo`: it needs a package with weights
        "continuous_batching.py",  # these by tests/engines, in environments of their own
        "vllm_offline.py",
        "container/serve.py",
        "test_capture_modes.py",
    }
