"""The first hour on a GPU: `make gpu`, or `python -m benchmarks.first_hour --out RESULTS.json`.

Steps run in the order of their value, each in a process of its own and under its own time limit, so
that a hang or a crash costs one step. After each step the results are written: as JSON, and beside
it as a table for docs/gpu.md. Results of earlier runs on the same device stay until their step runs
again. What has passed at the same commit, without local changes, is not repeated; `--again` repeats
all.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .record import machine_facts, versions

ROOT = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
CHANGED = "+local changes"
KEPT = 4000
"""Characters kept of the output of a step that failed."""


@dataclass(frozen=True)
class Step:
    """A command that shows something, or `why_not` if this machine cannot show it.

    The last line of its output is its result: JSON, or the summary of pytest. Machines with a GPU
    are often lent for ten minutes at a time, which `limit_s` stays below.
    """

    name: str
    shows: str
    command: Sequence[str]
    limit_s: int
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""


def tests(
    name: str, shows: str, limit_s: int, small: bool, *paths: str, **environment: str
) -> Step:
    command = [PYTHON, "-m", "pytest", "-q", "-m", "gpu and not slow" if small else "gpu", *paths]
    return Step(name, shows, command, limit_s, environment)


def measurement(name: str, shows: str, limit_s: int, small: bool, *before: str) -> Step:
    """A function of `benchmarks.on_device`; `before` is a program that runs it."""
    command = [*before, PYTHON, "-m", "benchmarks.on_device", name, *["--small"] * small]
    why_not = "" if not before or shutil.which(before[0]) else f"{before[0]} is not installed"
    return Step(name if not before else before[0], shows, command, limit_s, why_not=why_not)


def steps(small: bool, num_devices: int, out: Path) -> list[Step]:
    """All steps, the most valuable first."""
    job = ["piecegraph", "run", "--device=cuda", "--requests=8", "--verify=all"]
    job += [f"--model={'layers=2,hidden=64' if small else 'small'}"]
    cached = [PYTHON, "-m", *job, f"--cache-dir={out.parent / 'first-hour-cache'}"]
    ranks = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return [
        tests("operations", "attention and graphs below torch's surface, equal to the CPU's", 300,
              small, "tests/torch_compat", "tests/tools/test_attention_gpu.py"),
        measurement("captured_decode", "a captured decode step equals the model", 300, small),
        tests("captures", "recordings, segments, lifetimes and addresses on the device", 570,
              small, "tests/runtime"),
        Step("cold start", "the reference engine under Inductor; every step is verified", cached,
             570),
        Step("warm start", "the same from its bundle", cached, 300),
        tests("rules", "captures that fail, streams, other graphs, memory of captures", 570,
              small, "tests/cuda_stand_in"),
        measurement("graph_bytes", "bytes of graphs, by torch's allocator and by the driver", 570,
                    small),
        measurement("plan_and_largest_step", "memory_plan is followed and nothing runs out", 570,
                    small),
        measurement("engine_graph_beside_ours", "a graph of the engine and ours stay right", 300,
                    small),
        measurement("captured_decode", "no invalid access in a captured decode step", 570, True,
                    "compute-sanitizer"),
        tests("expandable segments", "captures and memory under expandable_segments:True", 570,
              small, "tests/cuda_stand_in", "tests/runtime",
              PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        Step("two ranks", "tensor parallelism: NCCL in pieces and in FULL graphs",
             [*ranks, "-m", "benchmarks.on_device", "two_ranks", *["--small"] * small], 570,
             why_not="" if num_devices > 1 else "one device"),
        measurement("step_cost", "a step beside a graph by hand and mode=reduce-overhead", 570,
                    small),
        measurement("segments", "steps of 1, 17 and 65 segments beside bare replays", 570, small),
        measurement("lazy_under_load", "what a lazy capture costs the step that makes it", 300,
                    small),
        measurement("executable_update", "switching one executable between sizes", 300, small),
        Step("step benchmark", "the library's own cost of a step",
             [PYTHON, "-m", "benchmarks", "step", "--quick", "--json", "-"], 570),
    ]  # fmt: skip


def run_step(step: Step) -> dict[str, Any]:
    """What a step gave: its status, seconds and result, or the end of its output."""
    facts: dict[str, Any] = {
        "step": step.name,
        "shows": step.shows,
        "command": shlex.join(step.command),
    }
    if step.why_not:
        return {**facts, "status": "not run", "reason": step.why_not}
    began = time.monotonic()
    child = subprocess.Popen(
        step.command, cwd=ROOT, env=os.environ | step.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        output, errors = child.communicate(timeout=step.limit_s)
        status = "passed" if child.returncode == 0 else f"failed ({child.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        status = f"stopped after {step.limit_s} s"
    facts |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    if status != "passed":
        return {**facts, "output": (output + errors)[-KEPT:]}
    return {**facts, "result": read_result(output)}


def read_result(output: str) -> Any:
    """JSON if the output is JSON or ends in it, else the summary of pytest or the last line."""
    lines = [line for line in output.splitlines() if line.strip()]
    for text in (output, lines[-1] if lines else ""):
        try:
            return json.loads(text)
        except ValueError:
            continue
    summaries = [line for line in lines if re.search(r"\d (passed|failed|skipped).* in \d", line)]
    return re.sub(r"^=+ | =+$", "", [*lines, *summaries][-1]).strip() if lines else ""


def write(out: Path, record: dict[str, Any]) -> None:
    """The JSON and the table, each replaced at once, so that a kill loses one step at most."""
    for path, text in (
        (out, json.dumps(record, indent=2)),
        (out.with_suffix(".md"), table(record)),
    ):
        beside = path.with_name(path.name + ".new")
        beside.write_text(text + "\n")
        beside.replace(path)


def table(record: dict[str, Any]) -> str:
    """The results for docs/gpu.md."""
    device, torch = record["device"], record["versions"]["torch"]
    head = f"{record['date']}, {device}, torch {torch}, small: {record['small']}"
    rows = [
        f"| {each['step']} | {each['shows']} | {each['status']} | {each.get('seconds', '')} | "
        f"{_shown(each)} | {each['commit']} |"
        for each in record["steps"]
    ]
    return "\n".join([head, "", "| step | what it shows | status | seconds | result | commit |",
                      "|---|---|---|---|---|---|", *rows])  # fmt: skip


def _shown(step: dict[str, Any]) -> str:
    if "reason" in step:
        return str(step["reason"])
    result = step.get("result")
    if not isinstance(result, dict):
        return str(result or "see the JSON").replace("|", "/")
    flat = {key: value for key, value in result.items() if isinstance(value, int | float | str)}
    return ", ".join(f"{key} {_short(value)}" for key, value in flat.items()) or "see the JSON"


def _short(value: Any) -> str:
    return f"{float(f'{value:.3g}'):g}" if isinstance(value, float) else str(value)


def device_facts() -> dict[str, Any]:
    """The device, asked in a process of its own: the steps find it as it is."""
    code = (
        "import json, torch; n = torch.cuda.device_count(); "
        "print(json.dumps({'device': torch.cuda.get_device_name() if n else None, 'devices': n, "
        "'bytes': torch.cuda.mem_get_info()[1] if n else 0, 'cuda': torch.version.cuda}))"
    )
    done = subprocess.run([PYTHON, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"torch cannot be asked for a device:\n{done.stderr}")
    facts: dict[str, Any] = read_result(done.stdout)
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu.json"), help="the JSON to write")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--small", action="store_true", help="sizes for the stand-in")
    parser.add_argument("--again", action="store_true", help="repeat what has passed")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    options = parser.parse_args()
    out = options.out.resolve()
    facts = device_facts()
    if not facts["devices"]:
        raise SystemExit("torch sees no CUDA device")
    plan = steps(options.small, facts["devices"], out)
    if options.list:
        print(*(f"{each.name:28} {each.limit_s:4} s  {each.shows}" for each in plan), sep="\n")
        return 0
    record = {
        "date": datetime.now(UTC).date().isoformat(), **facts, "machine": machine_facts(),
        "versions": versions(), "small": options.small, "steps": [],
    }  # fmt: skip
    commit, done = commit_of(ROOT), earlier_steps(out, record)
    for step in plan:
        if options.only and step.name not in options.only:
            continue
        before = done.get(step.name, {})
        same = before.get("commit") == commit and not commit.endswith(CHANGED)
        if options.again or not same or before["status"] != "passed":
            done[step.name] = {**_run_and_say(step), "commit": commit}
        write(out, {**record, "steps": [done[each.name] for each in plan if each.name in done]})
    results = [done[each.name] for each in plan if each.name in done]
    failed = [each["step"] for each in results if each["status"] not in ("passed", "not run")]
    print(f"{len(results) - len(failed)} steps passed or are not for this machine")
    print(f"{len(failed)} failed:", *failed)
    return 1 if failed else 0


def _run_and_say(step: Step) -> dict[str, Any]:
    print(f"{step.name}: {step.shows} …", flush=True)
    result = run_step(step)
    print(f"    {result['status']} {_shown(result)}"[:300], flush=True)
    return result


def commit_of(folder: Path) -> str:
    """The commit; ends in CHANGED if there are local changes, or no commit is known."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", f"--dirty={CHANGED}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or CHANGED


def earlier_steps(out: Path, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The results of earlier runs by step; those of another device or torch are not overwritten."""
    if not out.exists():
        return {}
    earlier = json.loads(out.read_text())
    for key in ("device", "versions", "small"):
        if earlier.get(key) != record[key]:
            raise SystemExit(f"{out} has results of another run, which differ in {key}: move it")
    return {each["step"]: each for each in earlier["steps"]}


if __name__ == "__main__":
    sys.exit(main())
