"""The Python samples run: those of a page of docs/ as one program, those of README.md each."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import piecegraph as pg

ROOT = Path(pg.__file__).parent
DOCS = ROOT / "docs"
PAGES = [
    "bisect.md",
    "check.md",
    "prepared_model.md",
    "production.md",
    "steps.md",
    "testing-capture-modes.md",
]


def samples(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def run():
    """`run(script, **variables)`: the output of a program, which must succeed."""
    command = [sys.executable, Path(__file__).with_name("run_programs.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as forking:

        def run(script, **variables):
            output = script.with_suffix(".output")
            request = [str(script), str(output), {**os.environ, **variables}]
            print(json.dumps(request), file=forking.stdin, flush=True)
            status = forking.stdout.readline()
            assert status == "0\n", output.read_text()
            return output.read_text()

        yield run
        forking.stdin.close()


@pytest.mark.compile
@pytest.mark.parametrize("name", PAGES)
def test_the_samples_of_a_page_run(run, name, tmp_path):
    blocks = samples(DOCS / name)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    run(script)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("example", samples(ROOT / "README.md"))
def test_an_example_of_the_readme_runs(run, example, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(example)
    assert "tensor(" in run(script, XDG_CACHE_HOME=str(tmp_path), HOME=str(tmp_path))


def test_every_method_of_a_prepared_model_is_described():
    page = (DOCS / "prepared_model.md").read_text()
    methods = [name for name in dir(pg.PreparedModel) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}" not in page] == []
