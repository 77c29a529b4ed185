"""The example that needs a device."""

import runpy
from pathlib import Path

import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_runner_written_by_hand(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    try:
        runpy.run_path(str(EXAMPLES / "plain_runner.py"), run_name="__main__")
    finally:
        torch.set_default_device(None)
    assert "5 requests through both runners: equal tokens" in capsys.readouterr().out
