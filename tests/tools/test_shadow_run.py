"""From a wrong step of a running engine to its file, and from the file to the cause."""

import json
from pathlib import Path

import pytest

from piecegraph.tools.cli.app import main

from . import faulty_models as models

pytestmark = pytest.mark.compile

MODEL = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--requests", "3", "--no-cache"]
SHADOW = ["--shadow", "2", "--set", "shadow.share=1.0", "--verify", "none"]


def test_a_wrong_step_is_the_exit_status_and_its_file_names_the_operator(
    configured, registered, tmp_path, capsys
):
    configured(compiler=registered(models.wrong_activations))
    report = tmp_path / "report.json"
    command = ["run", *MODEL, *SHADOW, "--dump-dir", str(tmp_path), "--json", str(report)]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    proved = lines.index("not verified") + 1
    assert lines[proved].startswith("steps proved while serving: ")
    (wrong,) = json.loads(report.read_text())["shadow"]["wrong"]
    assert lines[proved + 1].startswith(f"WRONG step of {wrong['num_tokens']} tokens")
    assert Path(wrong["file"]).parent == tmp_path / "shadow"
    assert main(["bisect", *MODEL, "--replay", wrong["file"]]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("stage=compiler piece=1 operator=torch.nn.functional.silu (model.py:")
