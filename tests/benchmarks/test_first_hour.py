"""The first hour on a GPU: a step that hangs or fails costs one step, and results are kept."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest

from piecegraph.benchmarks import first_hour, gpu_wheels, on_device
from piecegraph.benchmarks.first_hour import PARTS, Step, read_result, run_step, steps
from tests.cuda_stand_in.mutants import mutants


def python(code: str, limit_s: int = 30, **facts: str) -> Step:
    return Step("step", "A", "something", [sys.executable, "-c", code], limit_s, **facts)


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
def test_each_part_is_one_command_and_captures_come_first(small, tmp_path):
    plan = steps(small, 1, tmp_path)
    names = [step.name for step in plan]
    assert len(set(names)) == len(names)
    assert [step.part for step in plan] == sorted(step.part for step in plan)
    assert all(step.limit_s <= PARTS[step.part].limit_s < 480 for step in plan)
    assert sum(part.limit_s for part in PARTS.values()) <= 2160
    assert names[0] == "captured_decode"
    measured = {step.command[-1] for step in steps(False, 2, tmp_path)}
    assert set(on_device.MEASUREMENTS) <= measured | {"captured_decode", "invalid_access"}
    (two,) = [step for step in plan if step.name == "two_ranks"]
    assert two.why_not == "one device"


class FirstHour:
    """`first_hour.main` with steps that note that they ran; those in `failing` fail."""

    def __init__(self, results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.results, self.ran, self.failing = results, list[str](), set[str]()
        self.commit, self.device = "c1", "a device"
        plan = [Step(name, part, "a fact", [], 1) for name, part in STEPS.items()]
        facts = {"devices": 1, "bytes": 1, "cuda": "13.0"}
        monkeypatch.setattr(first_hour, "device_facts", lambda: {"device": self.device, **facts})
        monkeypatch.setattr(first_hour, "commit_of", lambda folder: self.commit)
        monkeypatch.setattr(first_hour, "steps", lambda *_: plan)
        monkeypatch.setattr(first_hour, "run_step", self._run)
        self._argv = partial(monkeypatch.setattr, sys, "argv")

    def _run(self, step: Step) -> dict[str, str]:
        self.ran.append(step.name)
        if step.name in self.failing:
            raise KeyboardInterrupt  # the command is ended
        return {"step": step.name, "shows": step.shows, "status": "passed", "result": "a | b"}

    def run(self, *options: str) -> list[str]:
        """The steps that ran."""
        self._argv(["first_hour", "--results", str(self.results), *options])
        self.ran.clear()
        with suppress(KeyboardInterrupt):
            assert first_hour.main() == 0
        return list(self.ran)


STEPS = {"one": "A", "two": "A", "three": "B", "four": "C"}


@pytest.fixture
def hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FirstHour:
    return FirstHour(tmp_path / "results", monkeypatch)


def test_an_ended_command_goes_on_where_it_was(hour, tmp_path):
    hour.failing = {"two"}
    assert hour.run("A") == ["one", "two"]
    hour.failing = set()
    hour.results = hour.results.rename(tmp_path / "passed in again")
    assert hour.run("A") == ["two"]
    assert hour.run() == ["three", "four"]
    assert sorted(path.name for path in hour.results.iterdir()) == ["A.json", "B.json", "C.json"]
    assert hour.run("--again", "B") == ["three"]
    assert "| A | two | a fact | passed |  | a / b |" in first_hour.table(hour.results)


@pytest.mark.parametrize("field", ["commit", "device"])
def test_results_of_other_sources_or_another_device_are_not_reused(hour, field):
    hour.run()
    setattr(hour, field, "another")
    assert hour.run() == list(STEPS)
    assert hour.run() == []


def test_a_part_ends_within_its_limit(hour, monkeypatch):
    monkeypatch.setitem(PARTS, "A", replace(PARTS["A"], limit_s=0))
    monkeypatch.setattr(first_hour, "run_step", lambda step: pytest.fail("it ran"))
    record = {"part": "A", "commit": "", "device": "", "versions": {}, "small": True}
    hour.results.mkdir()
    plan = [Step("one", "A", "a fact", [], 30)]
    (result,) = first_hour.run_part(plan, hour.results / "A.json", record)
    assert result["status"] == "no time left"
    monkeypatch.undo()
    limits = []
    monkeypatch.setattr(
        first_hour, "run_step", lambda step: limits.append(step.limit_s) or {"status": ""}
    )
    for small in (True, False):
        first_hour.run_part(plan, hour.results / "A.json", record | {"small": small}, again=True)
    assert limits == [30 * first_hour.SLOWER, 30]


@pytest.mark.slow
def test_sources_are_told_apart_without_git(tmp_path, monkeypatch):
    git = ["git", "-c", "user.name=n", "-c", "user.email=e", "-C", str(tmp_path)]
    (tmp_path / "file.py").write_text("1")
    nothing = first_hour.commit_of(tmp_path)
    assert nothing.startswith("no commit, sources ")
    for arguments in (["init", "-q"], ["add", "file.py"], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], check=True)
    commit = first_hour.commit_of(tmp_path)
    assert len(commit) == 12
    (tmp_path / "file.py").write_text("2")
    changed = first_hour.commit_of(tmp_path)
    assert changed.startswith(f"{commit}{first_hour.CHANGED}, sources ")
    assert changed[-12:] != nothing[-12:]
    monkeypatch.setenv(first_hour.COMMIT, "told")
    assert first_hour.commit_of(tmp_path) == "told"


def test_other_versions_than_those_of_the_device_are_named():
    same = {"python": "3.12.3", "torch": "2.11.0+cu130", "triton": "3.6.0", "cuda": "13.0"}
    assert first_hour.other_versions(same) == []
    for name, other in (("python", "3.11.9"), ("torch", "2.11.1"), ("triton", "3.60.0")):
        (said,) = first_hour.other_versions({**same, name: other})
        assert said.startswith(f"{name} {other} instead of ")


@pytest.mark.parametrize("name", first_hour.DEVICE["limits"])
def test_each_limit_can_fail(name):
    limit = first_hour.DEVICE["limits"][name]
    worse = limit - 0.01 if name.endswith("_least") else limit * 1.05 + 1e-9
    assert on_device.above(name, limit) == []
    assert len(on_device.above(name, worse, on_device.DEVICE)) == 1
    assert on_device.above(name, worse, on_device.SMALL) == []


@pytest.mark.parametrize(
    ("costs", "failed"),
    [
        ({}, []),
        ({"full": 1.05}, ["full_over_by_hand"]),
        ({"unsplit": 1.05}, ["full_over_reduce_overhead"]),
        ({"full_host": 1.35}, ["host_over_by_hand"]),
        ({"in_place_host": 1.25}, ["host_over_in_place"]),
        ({"33_graphs_step_host": 1.35}, ["host_over_replays"]),
        ({"unseen": 1.0}, ["seen_of_5_percent_least"]),
    ],
    ids=str,
)
def test_a_planted_cost_fails_the_measurement_of_steps(costs, failed):
    """On a clock that only the steps move, by what the host and then the device take."""
    now = free = 0.0  # of the host, and when the device has done what is queued
    names = ("by_hand", "replay", "full", "in_place", "reduced", "unsplit")
    unseen = "unseen" in costs

    def step(name: str) -> None:
        nonlocal now, free
        now += 10e-6 * costs.get(f"{name}_host", 1.0)
        free = max(now, free) + (0 if unseen else 90e-6) * costs.get(name, 1.0)

    def wait() -> None:
        nonlocal now
        now = max(now, free) + (1e-3 if unseen else 0)

    clock = {"wait": wait, "clock": lambda: now}
    fns = {name: partial(step, name) for name in names}
    row = on_device.in_turn(fns, 3, planted=("by_hand", "replay"), **clock)
    pieces = {
        f"33_graphs_{each}": partial(step, f"33_graphs_{each}") for each in ("step", "replays")
    }
    row |= on_device.in_turn(pieces, 3, **clock)
    said = on_device.judged(row, on_device.DEVICE)
    assert [each.split()[0] for each in said] == failed


NO_MUTANT = {
    "step_cost": "only time is judged: a planted cost fails it above",
    "invalid_access": "is itself a planted fault, which the tool below must report",
    "libraries": "Triton's kernels are interpreted on the stand-in",
    "two_ranks": "the stand-in has no NCCL",
}
"""Measurements that fail by no mutant on the stand-in, and why."""


def test_each_other_measurement_has_a_mutant_that_fails_it():
    named = {each.step for each in mutants() if each.step}
    assert named == on_device.MEASUREMENTS.keys() - NO_MUTANT.keys()


TOOL = f"""#!{sys.executable}
import subprocess, sys
status = next((int(a.partition("=")[2]) for a in sys.argv if a.startswith("--error-exitcode=")), 0)
print("========= ERROR SUMMARY: {{found}} errors")
sys.exit(status if {{found}} else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("found", [0, 3])
def test_the_sanitizer_fails_its_step_and_must_see_a_planted_access(found, tmp_path, monkeypatch):
    """The tool returns the program's status for errors that it found, unless it is told another."""
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL.format(found=found))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    plan = [step for step in steps(True, 1, tmp_path) if step.name.startswith("sanitized")]
    passed = {step.name: run_step(step)["status"] == "passed" for step in plan}
    right = not found
    expected = {"sanitized steps": right, "sanitized attention": right}
    assert passed == {**expected, "sanitized fault": not right}


def test_wheels_hold_what_builds_and_tests_the_package_and_no_torch():
    names = {gpu_wheels.name(each) for each in gpu_wheels.requirements()}
    assert {"setuptools", "pydantic", "typer", "rich", "numpy", "pytest", "hypothesis"} <= names
    assert not {"torch", "triton", "piecegraph"} & names


def test_wheels_hold_what_the_tests_of_the_steps_import(tmp_path):
    """One file that cannot be imported ends all tests of its step."""
    named = [*gpu_wheels.requirements(), *(requires("torch") or ())]
    held = {gpu_wheels.name(each) for each in named} | {"torch", "triton", "piecegraph"}
    commands = [step.command for step in steps(False, 1, tmp_path)]
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
