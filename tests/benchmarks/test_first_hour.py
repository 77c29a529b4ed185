"""The first hour on a GPU: a step that hangs or fails costs one step, and results are kept."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from piecegraph.benchmarks import first_hour, gpu_wheels
from piecegraph.benchmarks.first_hour import Step, read_result, run_step, steps, table, write


def python(code: str, limit_s: int = 30, **facts: str) -> Step:
    return Step("step", "something", [sys.executable, "-c", code], limit_s, **facts)


@pytest.mark.slow
def test_a_step_that_hangs_is_stopped_with_its_children_and_keeps_its_output():
    code = (
        "import subprocess, sys; print('began', flush=True); "
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    result = run_step(python(code, limit_s=2))
    assert result["status"] == "stopped after 2 s"
    assert "began" in result["output"]


@pytest.mark.slow
def test_a_step_that_fails_keeps_its_output_and_one_that_passes_its_result():
    failed = run_step(python("print('why'); raise SystemExit(3)"))
    assert (failed["status"], failed["output"]) == ("failed (3)", "why\n")
    beside = "import sys; print('a table', file=sys.stderr); "
    for printed in ("print('noise'); print('{\"us\": 2.5}')", "print('{\\n\"us\": 2.5\\n}')"):
        passed = run_step(python(beside + printed))
        assert (passed["status"], passed["result"]) == ("passed", {"us": 2.5})
    assert run_step(python("", why_not="one device"))["status"] == "not run"


def test_the_summary_of_pytest_is_a_result():
    assert (
        read_result("....\n== 5 passed, 3 skipped in 0.52s ==\n") == "5 passed, 3 skipped in 0.52s"
    )
    assert read_result("5 passed in 1.00s\nnanobind: leaked 4 instances!\n") == "5 passed in 1.00s"
    assert read_result("") == ""


@pytest.mark.parametrize("small", [False, True])
def test_correctness_comes_before_speed_and_no_step_is_named_twice(small, tmp_path):
    names = [step.name for step in steps(small, 1, tmp_path / "gpu.json")]
    assert len(set(names)) == len(names)
    assert all(step.limit_s < 600 for step in steps(small, 1, tmp_path / "gpu.json"))
    assert names.index("captures") < names.index("graph_bytes") < names.index("step_cost")
    (two,) = [step for step in steps(small, 1, tmp_path / "gpu.json") if step.name == "two ranks"]
    assert two.why_not == "one device"


class FirstHour:
    """`first_hour.main` with steps that note that they ran; those in `failing` fail."""

    def __init__(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out, self.ran, self.failing = out, list[str](), set[str]()
        self.commit, self.device = "c1", "a device"
        plan = [Step(name, "a fact", [], 1) for name in ("one", "two", "three")]
        facts = {"devices": 1, "bytes": 1, "cuda": "13.0"}
        monkeypatch.setattr(first_hour, "device_facts", lambda: {"device": self.device, **facts})
        monkeypatch.setattr(first_hour, "commit_of", lambda folder: self.commit)
        monkeypatch.setattr(first_hour, "steps", lambda *_: plan)
        monkeypatch.setattr(first_hour, "run_step", self._run)
        self._argv = partial(monkeypatch.setattr, sys, "argv")

    def _run(self, step: Step) -> dict[str, str]:
        self.ran.append(step.name)
        status = "failed (1)" if step.name in self.failing else "passed"
        return {"step": step.name, "shows": step.shows, "status": status, "result": "a | b"}

    def run(self, *options: str) -> tuple[int, list[str]]:
        """The exit code and the steps that ran."""
        self._argv(["first_hour", "--out", str(self.out), *options])
        self.ran.clear()
        return first_hour.main(), list(self.ran)

    def results(self) -> dict[str, str]:
        steps = json.loads(self.out.read_text())["steps"]
        return {each["step"]: f"{each['status']} {each['commit']}" for each in steps}


@pytest.fixture
def hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FirstHour:
    return FirstHour(tmp_path / "gpu.json", monkeypatch)


def test_what_has_passed_is_not_repeated(hour, capsys):
    hour.failing = {"two"}
    assert hour.run() == (1, ["one", "two", "three"])
    hour.failing = set()
    assert hour.run() == (0, ["two"])
    assert hour.results() == dict.fromkeys(("one", "two", "three"), "passed c1")
    assert "| two | a fact | passed |  | a / b | c1 |" in hour.out.with_suffix(".md").read_text()
    assert hour.run("--again") == (0, ["one", "two", "three"])
    assert "2 failed" not in capsys.readouterr().out


def test_a_run_of_some_steps_keeps_the_results_of_the_others(hour):
    assert hour.run("--only", "three") == (0, ["three"])
    hour.commit = "c2"
    assert hour.run("--only", "one") == (0, ["one"])
    assert list(hour.results().items()) == [("one", "passed c2"), ("three", "passed c1")]
    assert hour.run() == (0, ["two", "three"])
    assert hour.results() == dict.fromkeys(("one", "two", "three"), "passed c2")


def test_results_of_no_commit_or_of_local_changes_are_not_reused(hour):
    for hour.commit in ("c1" + first_hour.CHANGED, first_hour.CHANGED):
        assert [hour.run()[1], hour.run()[1]] == [["one", "two", "three"]] * 2


def test_results_of_another_device_are_not_overwritten(hour):
    hour.run()
    hour.device = "another"
    with pytest.raises(SystemExit, match="which differ in device: move it"):
        hour.run()
    assert hour.results() == dict.fromkeys(("one", "two", "three"), "passed c1")


@pytest.mark.slow
def test_local_changes_are_part_of_a_commit(tmp_path):
    assert first_hour.commit_of(tmp_path) == first_hour.CHANGED
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    (tmp_path / "file").write_text("1")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = first_hour.commit_of(tmp_path)
    assert len(commit) == 12
    (tmp_path / "file").write_text("2")
    assert first_hour.commit_of(tmp_path) == commit + first_hour.CHANGED


def test_results_are_replaced_at_once(tmp_path):
    record = {
        "date": "today",
        "device": "d",
        "versions": {"torch": "2"},
        "small": True,
        "steps": [],
    }
    write(tmp_path / "gpu.json", record)
    assert json.loads((tmp_path / "gpu.json").read_text()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]
    assert table(record).splitlines()[0] == "today, d, torch 2, small: True"


def test_wheels_hold_what_builds_and_tests_the_package_and_no_torch():
    names = {gpu_wheels.name(each) for each in gpu_wheels.requirements()}
    assert {"setuptools", "pydantic", "typer", "rich", "numpy", "pytest", "hypothesis"} <= names
    assert not {"torch", "triton", "piecegraph"} & names


def test_wheels_hold_what_the_tests_of_the_steps_import(tmp_path):
    """One file that cannot be imported ends all tests of its step."""
    named = [*gpu_wheels.requirements(), *(requires("torch") or ())]
    held = {gpu_wheels.name(each) for each in named} | {"torch", "triton", "piecegraph"}
    commands = [step.command for step in steps(False, 1, tmp_path / "gpu.json")]
    named_paths = {
        first_hour.ROOT / word for each in commands if "pytest" in each for word in each
        if word.startswith("tests/")
    }  # fmt: skip
    assert len(named_paths) >= 4
    files = [first_hour.ROOT / "tests/conftest.py"]
    for path in named_paths:
        files += path.rglob("*.py") if path.is_dir() else [path]
    distributions = packages_distributions()
    missing = {
        (file.name, name)
        for file in files
        for node in ast.parse(file.read_text()).body
        for name in imported(node)
        if name in distributions and not held & {each.lower() for each in distributions[name]}
    }
    assert missing == set()


def imported(node: ast.stmt) -> list[str]:
    """The packages that a statement imports by their full names."""
    if isinstance(node, ast.Import):
        return [each.name.split(".")[0] for each in node.names]
    absolute = isinstance(node, ast.ImportFrom) and not node.level and node.module
    return [absolute.split(".")[0]] if absolute else []
