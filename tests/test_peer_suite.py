"""The runner of torch's suites, on a suite in their form."""

import json
import sys

import pytest

from tests import run_peer_suite

pytestmark = pytest.mark.compile

SUITE = """
import unittest
import torch
from torch._dynamo.backends.debugging import eager as compile_fx

class CpuTests(unittest.TestCase):
    def setUp(self):
        torch.compiler.reset()

    def check(self, function, *inputs):
        run = torch.compile(function, backend=lambda *given: compile_fx(*given))
        torch.testing.assert_close(run(*inputs), function(*inputs))
        return run

    def test_equal(self):
        self.check(lambda x: torch.ops.aten.pow(x, 2), torch.ones(3))

    def test_gradients(self):
        self.check(lambda x: x * 2, torch.ones(3, requires_grad=True))

    def test_name_of_the_backend(self):
        self.assertEqual(compile_fx.__name__, "eager")

    def test_wrong_anywhere(self):
        self.check(lambda x: torch.rand(3), torch.ones(3))

    @unittest.skip("no")
    def test_skipped(self):
        pass

class OtherTests(CpuTests):
    pass
"""


def test_verdicts_and_fallbacks_by_cause(tmp_path, monkeypatch, capsys):
    suite = tmp_path / "suite_of_a_peer.py"
    suite.write_text(SUITE)
    monkeypatch.setattr(sys, "argv", ["run_peer_suite", str(suite), "--compiler", "eager"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        run_peer_suite.main()
    *tests, sums = map(json.loads, capsys.readouterr().out.splitlines())
    assert {each["test"].rpartition(".")[2]: each["verdict"] for each in tests} == {
        "test_equal": "equal",
        "test_gradients": "equal",
        "test_name_of_the_backend": "worse",
        "test_wrong_anywhere": "fails in torch too",
        "test_skipped": "skipped",
    }
    causes = {"GradientsNeeded": 1}
    assert sums.pop("backend") == {"graphs": 2, "fallbacks": 1, "causes": causes}
    assert sums == {"equal": 2, "worse": 1, "fails in torch too": 1, "skipped": 1}
    assert ended.value.code == 1
