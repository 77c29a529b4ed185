"""The dump directory: what is in it, and that an edit of the generated code takes effect."""

import json
import re

import pytest
import torch

from piecegraph import Batch, prepare


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 3 + 1


@pytest.fixture
def result(small_config, tmp_path):
    """What a freshly prepared model makes of ones."""

    def make(compiler):
        config = small_config(graph_mode="NONE", compiler=compiler, codegen={"dump_dir": tmp_path})
        return prepare(Model(), config)(torch.ones(2, 4), batch=Batch(2, 2))

    return make


@pytest.mark.compile
def test_graphs_and_stitched_code_are_readable_files(result, tmp_path):
    result("eager")
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"graph.py", "piece_0.py", "stitched.py", "plan.json"}
    assert "x * 3" in (tmp_path / "piece_0.py").read_text()
    assert "def step(i0):" in (tmp_path / "stitched.py").read_text()
    assert json.loads((tmp_path / "plan.json").read_text())["symbols"][0]["label"] == "num_tokens"
    for path in tmp_path.glob("*.py"):
        compile(path.read_text(), str(path), "exec")


@pytest.mark.compile
@pytest.mark.heavy
def test_an_edit_of_the_generated_code_is_used(result, tmp_path):
    assert result("inductor").eq(4).all()
    (folder,) = tmp_path.glob("inductor_*")
    (code,) = (path for path in folder.glob("*/*.py") if "async_compile" in path.read_text())
    edited = re.sub(r"static_cast<float>\(3(\.0)?\)", "static_cast<float>(5.0)", code.read_text())
    assert edited != code.read_text()
    code.write_text(edited)
    assert result("inductor").eq(6).all()
