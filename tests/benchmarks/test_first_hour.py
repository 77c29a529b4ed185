"""The first hour on a GPU: a step that hangs or fails costs one step, and results are kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from piecegraph.benchmarks import first_hour, gpu_wheels
from piecegraph.benchmarks.first_hour import Step, read_result, run_step, steps, table, write


def python(code: str, limit_s: int = 30, **facts: str) -> Step:
    return Step("step", "something", [sys.executable, "-c", code], limit_s, **facts)


@pytest.mark.slow
def test_a_step_that_hangs_is_stopped_with_its_children_and_keeps_its_output() -> None:
    code = (
        "import subprocess, sys; print('began', flush=True); "
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    result = run_step(python(code, limit_s=2))
    assert result["status"] == "stopped after 2 s"
    assert "began" in result["output"]


@pytest.mark.slow
def test_a_step_that_fails_keeps_its_output_and_one_that_passes_its_result() -> None:
    failed = run_step(python("print('why'); raise SystemExit(3)"))
    assert (failed["status"], failed["output"]) == ("failed (3)", "why\n")
    passed = run_step(python("print('noise'); print('{\"us\": 2.5}')"))
    assert (passed["status"], passed["result"]) == ("passed", {"us": 2.5})
    assert run_step(python("", why_not="one device"))["status"] == "not run"


def test_the_summary_of_pytest_is_a_result() -> None:
    assert (
        read_result("....\n== 5 passed, 3 skipped in 0.52s ==\n") == "5 passed, 3 skipped in 0.52s"
    )
    assert read_result("") == ""


@pytest.mark.parametrize("small", [False, True])
def test_correctness_comes_before_speed_and_no_step_is_named_twice(
    small: bool, tmp_path: Path
) -> None:
    names = [step.name for step in steps(small, 1, tmp_path / "gpu.json")]
    assert len(set(names)) == len(names)
    assert names.index("captures") < names.index("graph_bytes") < names.index("step_cost")
    (two,) = [step for step in steps(small, 1, tmp_path / "gpu.json") if step.name == "two ranks"]
    assert two.why_not == "one device"


def test_what_has_passed_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, ran = tmp_path / "gpu.json", list[str]()
    plan = [Step(name, "a fact", [], 1) for name in ("one", "two")]

    def run(step: Step) -> dict[str, str]:
        ran.append(step.name)
        status = "failed (1)" if step.name == "two" and len(ran) < 3 else "passed"
        return {"step": step.name, "shows": step.shows, "status": status, "result": "a | b"}

    device = {"device": "a device", "devices": 1, "bytes": 1, "cuda": "13.0"}
    monkeypatch.setattr(first_hour, "device_facts", lambda: device)
    monkeypatch.setattr(first_hour, "steps", lambda *_: plan)
    monkeypatch.setattr(first_hour, "run_step", run)
    monkeypatch.setattr(sys, "argv", ["first_hour", "--out", str(out)])
    assert [first_hour.main(), first_hour.main()] == [1, 0]
    assert ran == ["one", "two", "two"]
    assert [each["status"] for each in json.loads(out.read_text())["steps"]] == ["passed"] * 2
    assert "| two | a fact | passed |  | a / b |" in out.with_suffix(".md").read_text()
    assert "2 failed" not in capsys.readouterr().out


def test_results_are_replaced_at_once(tmp_path: Path) -> None:
    record = {
        "date": "today",
        "device": "d",
        "versions": {"torch": "2"},
        "commit": "c",
        "steps": [],
    }
    write(tmp_path / "gpu.json", record)
    assert json.loads((tmp_path / "gpu.json").read_text()) == record
    assert sorted(path.name for path in tmp_path.iterdir()) == ["gpu.json", "gpu.md"]
    assert table(record).splitlines()[0] == "today, d, torch 2, commit c"


def test_wheels_hold_what_builds_and_tests_the_package_and_no_torch() -> None:
    names = {gpu_wheels.name(each) for each in gpu_wheels.requirements()}
    assert {"setuptools", "pydantic", "typer", "rich", "numpy", "pytest", "hypothesis"} <= names
    assert not {"torch", "triton", "piecegraph"} & names
