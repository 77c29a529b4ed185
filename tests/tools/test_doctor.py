"""`piecegraph doctor`: each finding with what to do, and a status."""

import json
import sys

import pytest

from piecegraph.tools.cli import doctor_command
from piecegraph.tools.cli.app import main
from piecegraph.torch_compat.compiling import toolchain


def doctor(tmp_path, capsys, *more):
    arguments = ["doctor", "--json", "-", "--cache-dir", str(tmp_path / "cache"), *more]
    status = main(arguments)
    return status, json.loads(capsys.readouterr().out)


OWN = """
import torch, piecegraph

def make():
    inputs = {"input": "float32[num_tokens, 8]"}
    return torch.nn.Linear(8, 8), piecegraph.Config(inputs=inputs, max_num_tokens=16)
"""


def test_machine_that_is_right_also_for_a_model_that_never_started(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    (tmp_path / "doctors_own_model.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for of in ((), ("--of", f"{tmp_path}/doctors_own_model.py:make")):
        status, report = doctor(tmp_path, capsys, *of)
        assert (status, [name for name, row in report.items() if row["fix"]]) == (0, [])
    assert report["trust"]["found"] == "signs nothing, trusts 0 keys"
    assert str(report["start"]["found"]).startswith("would compile: ")


def test_a_python_whose_parser_fails_beside_a_trace_is_named(monkeypatch):
    named = []
    for version in ((3, 11, 8), (3, 11, 9), (3, 12, 0)):
        monkeypatch.setattr(sys, "version_info", version)
        named.append("gh-106905" in doctor_command._python()[0])
    assert named == [True, False, False]


def no_compiler(tmp_path, monkeypatch):
    monkeypatch.setattr(toolchain, "cpp_compiler", lambda: None)  # torch keeps its answer


def part_off(tmp_path, monkeypatch):
    monkeypatch.setenv("PIECEGRAPH_OFF", "faster")


def open_directory(tmp_path, monkeypatch):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)


def full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_command, "LEAST_FREE", 1 << 60)


def missing_keys(tmp_path, monkeypatch):
    monkeypatch.setenv("PIECEGRAPH_CACHE_TRUSTED_KEYS_FILE", str(tmp_path / "none.pub"))


@pytest.mark.parametrize(
    ("fault", "name", "fix"),
    [
        (no_compiler, "compiler", "Install g++ or clang++"),
        (part_off, "variables", "Unset PIECEGRAPH_OFF"),
        (open_directory, "cache", "chmod 700"),
        (full_disk, "disk", "cache prune"),
        (missing_keys, "trust", "none.pub"),
    ],
)
def test_fault_is_named_with_what_to_do(tmp_path, capsys, monkeypatch, fault, name, fix):
    fault(tmp_path, monkeypatch)
    status, report = doctor(tmp_path, capsys)
    assert status == 1
    assert fix in str(report[name]["fix"])


@pytest.mark.parametrize("text", ["[]", "null", "[1]", "x", "[" * 10**5, '{"inputs": 3}'])
def test_a_file_that_has_no_settings_is_named(tmp_path, capsys, text):
    (tmp_path / "settings.json").write_text(text)
    assert main(["doctor", "--config", str(tmp_path / "settings.json")]) == 1
    assert "not usable" in capsys.readouterr().out
