"""The Python samples of a page form one program, which runs. README's are tested in tests/tools."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import piecegraph as pg

DOCS = Path(__file__).parents[1] / "docs"
PAGES = [
    "bisect.md",
    "check.md",
    "prepared_model.md",
    "production.md",
    "steps.md",
    "testing-capture-modes.md",
]


@pytest.mark.compile
@pytest.mark.parametrize("name", PAGES)
def test_the_samples_of_a_page_run(name, tmp_path):
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / name).read_text(), re.DOTALL | re.M)
    assert blocks
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(blocks))
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=280
    )
    assert done.returncode == 0, done.stderr


def test_every_method_of_a_prepared_model_is_described():
    page = (DOCS / "prepared_model.md").read_text()
    methods = [name for name in dir(pg.PreparedModel) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}" not in page] == []
