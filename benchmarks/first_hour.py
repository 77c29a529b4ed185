"""The first hour on a GPU, in five parts: `make gpu`, or for one part
`python -m benchmarks.first_hour A --results DIR`.

A part is one command. It ends within its own limit, below the ten minutes for which such machines
run a command, and so does each step in it, which has a process of its own: a hang or a crash costs
one step. DIR gets one small file for each part, written after each step: pass the files in again,
and what has passed with the same sources is not repeated. Nothing else is written there. The limits
that decide whether a measurement passes are those of `benchmarks/device.toml`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .record import machine_facts, versions

ROOT = Path(__file__).resolve().parents[1]
DEVICE: dict[str, Any] = tomllib.loads((ROOT / "benchmarks" / "device.toml").read_text())
PYTHON = sys.executable
CHANGED = "+local changes"
COMMIT = "PIECEGRAPH_COMMIT"
"""Names the commit of a tree that comes without `.git`."""
SLOWER = 4
"""Limits of seconds are those of a device. With `--small` they are longer by this factor: the
stand-in computes with the host's processor, which others may use."""
KEPT = 4000
"""Characters kept of the output of a step that failed."""
REPORTED = 86
"""Exit status of a program in which compute-sanitizer found an error."""


@dataclass(frozen=True)
class Part:
    """Steps that one command runs within `limit_s`."""

    shows: str
    limit_s: int
    if_it_fails: str


PARTS = {
    "A": Part(
        "captures on a driver: values, pools, lifetimes, rules",
        420,
        "stop and give the machine back: repair it on the stand-in, with the error as an injected "
        "fault; nothing else is worth device time",
    ),
    "B": Part(
        "what a step costs, first replays, executables, forecasts",
        440,
        "rows that passed stay; go on with C",
    ),
    "C": Part(
        "cold and warm starts, workers, libraries",
        440,
        "run it again with TORCHINDUCTOR_COMPILE_THREADS=1, to tell workers from generated code",
    ),
    "D": Part(
        "invalid accesses, allocator modes, two ranks",
        300,
        "a sandboxed device refuses the sanitizer: note it, and skip",
    ),
    "E": Part(
        "attention and serving, with overlap and without",
        400,
        "tokens differ: `piecegraph run --record FILE`, and bisect it on a CPU",
    ),
}


@dataclass(frozen=True)
class Step:
    """A command that shows something, or `why_not` if this machine cannot show it.

    The last line of its output is its result: JSON, or the summary of pytest. It passes with the
    exit status `expects`: a step that must notice a planted fault has another one than 0.
    """

    name: str
    part: str
    shows: str
    command: Sequence[str]
    limit_s: int
    environment: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""
    expects: int = 0


def tests(
    name: str, part: str, shows: str, limit_s: int, small: bool, *paths: str, **environment: str
) -> Step:
    """A run of pytest that ends after a few failures, and whose output is their assertions."""
    command = [PYTHON, "-m", "pytest", "-q", "-W", "default", "-m"]
    command += ["gpu and not slow" if small else "gpu", "--maxfail=5", "--show-capture=no"]
    command += ["--tb=short", "-o", "log_level=WARNING", *paths]
    return Step(name, part, shows, command, limit_s, environment)


def measurement(name: str, part: str, shows: str, limit_s: int, small: bool) -> Step:
    """A function of `benchmarks.on_device`."""
    command = [PYTHON, "-m", "benchmarks.on_device", name, *["--small"] * small]
    return Step(name, part, shows, command, limit_s)


def sanitized(step: Step, name: str, expects: int = 0) -> Step:
    """`step` under compute-sanitizer, which returns the status of the program unless it is told
    another one for errors."""
    tool = "compute-sanitizer"
    why_not = "" if shutil.which(tool) else f"{tool} is not installed"
    command = [tool, f"--error-exitcode={REPORTED}", *step.command]
    return replace(step, name=name, command=command, why_not=why_not, expects=expects)


def steps(small: bool, num_devices: int, results: Path) -> list[Step]:
    """All steps, the most valuable first. Nothing is written to `results` but results."""
    runtime, stand_in = "tests/runtime", "tests/cuda_stand_in"
    attention = "tests/tools/test_attention_gpu.py"
    ranks = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    own = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}  # the tool sees the end of each tensor
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    no_kernels = "Triton kernels are interpreted" if interpreted else ""
    return [
        measurement("captured_decode", "A", "FULL and PIECEWISE decode steps equal the model's",
                    90, small),
        tests("operations", "A", "attention and graphs below torch's surface, equal to the CPU's",
              120, small, "tests/torch_compat", attention),
        tests("captures", "A", "recordings, segments, lifetimes and addresses on the device", 240,
              small, runtime),
        tests("rules", "A", "captures that fail, streams, other graphs, memory of captures", 240,
              small, stand_in),
        measurement("step_cost", "B", "steps beside graphs by hand and mode=reduce-overhead", 200,
                    small),
        measurement("first_replay", "B", "no step pays for the upload of its graph", 120, small),
        measurement("graph_bytes", "B", "bytes of graphs: planned, stated, by the driver", 120,
                    small),
        measurement("plan_and_largest_step", "B", "memory_plan is followed, nothing runs out", 120,
                    small),
        measurement("engine_graph_beside_ours", "B", "a graph of the engine and ours stay right",
                    60, small),
        measurement("lazy_under_load", "B", "what a lazy capture costs the step that makes it", 60,
                    small),
        measurement("executable_update", "B", "switching one executable between sizes", 60, small),
        measurement("starts", "C", "cold and warm start of the engine, memory of each process", 300,
                    small),
        measurement("two_models", "C", "a second model in one process; nothing is left behind", 150,
                    small),
        replace(measurement("libraries", "C", "libraries, and kernels that are timed for one size",
                            240, small), why_not=no_kernels),
        sanitized(measurement("captured_decode", "D", "no invalid access in captured steps", 150,
                              True), "sanitized steps"),
        sanitized(measurement("invalid_access", "D", "the tool reports a planted access", 90, True),
                  "sanitized fault", REPORTED),
        sanitized(tests("", "D", "no invalid access in the attention kernel", 150, small, attention,
                        **own), "sanitized attention"),
        tests("expandable segments", "D", "captures under expandable_segments:True", 300, small,
              f"{stand_in}/test_captures.py", f"{runtime}/test_lifetimes.py", **expandable),
        Step("two_ranks", "D", "tensor parallelism: NCCL in pieces and in FULL graphs",
             [*ranks, "-m", "benchmarks.on_device", "two_ranks", *["--small"] * small], 150,
             why_not="" if num_devices > 1 else "one device"),
        measurement("attention", "E", "the paged kernel beside SDPA", 120, small),
        measurement("serving", "E", "the reference engine: overlap on and off, the same tokens",
                    400, small),
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
        passed = child.returncode == step.expects
        status = "passed" if passed else f"failed ({child.returncode})"
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, errors = child.communicate()
        status = f"stopped after {step.limit_s} s"
    facts |= {"status": status, "seconds": round(time.monotonic() - began, 1)}
    result = read_result(output)
    if status == "passed" or isinstance(result, dict):
        facts["result"] = result
    if status != "passed":
        facts["output"] = (output + errors)[-KEPT:]
    return facts


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


def run_part(
    plan: Sequence[Step], path: Path, record: dict[str, Any], again: bool = False
) -> list[dict[str, Any]]:
    """Run the steps of a part that have not passed with these sources. `path` is written after
    each, and replaced at once, so that a kill loses one step at most."""
    slower = SLOWER if record["small"] else 1
    ends = time.monotonic() + PARTS[record["part"]].limit_s * slower
    done = {} if again else earlier_steps(path, record)
    for step in plan:
        if done.get(step.name, {}).get("status") == "passed":
            continue
        left = int(ends - time.monotonic())
        limit_s = step.limit_s * slower
        if left < min(limit_s, 20):
            done[step.name] = {"step": step.name, "shows": step.shows, "status": "no time left"}
        else:
            print(f"{step.name}: {step.shows} …", flush=True)
            done[step.name] = run_step(replace(step, limit_s=min(limit_s, left)))
            print(f"    {done[step.name]['status']} {_shown(done[step.name])}"[:300], flush=True)
        results = [done[each.name] for each in plan if each.name in done]
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps({**record, "steps": results}, indent=1) + "\n")
        beside.replace(path)
    return [done[each.name] for each in plan]


def earlier_steps(path: Path, record: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Results that an earlier command left; none of other sources, versions or devices."""
    if not path.exists():
        return {}
    earlier = json.loads(path.read_text())
    same = all(earlier.get(key) == record[key] for key in ("commit", "device", "versions", "small"))
    return {each["step"]: each for each in earlier["steps"]} if same else {}


def table(folder: Path) -> str:
    """The results in a folder as a table for docs/gpu.md."""
    rows = [
        "| part | step | what it shows | status | seconds | result |",
        "|---|---|---|---|---|---|",
    ]
    for path in sorted(folder.glob("?.json")):
        record = json.loads(path.read_text())
        told = f"{record['date']}, {record['device']}, torch {record['versions']['torch']}, "
        rows.insert(0, f"{record['part']}: {told}small: {record['small']}, {record['commit']}\n")
        rows += [
            f"| {record['part']} | {each['step']} | {each['shows']} | {each['status']} | "
            f"{each.get('seconds', '')} | {_shown(each)} |"
            for each in record["steps"]
        ]
    return "\n".join(rows)


def _shown(step: dict[str, Any]) -> str:
    if "reason" in step:
        return str(step["reason"])
    result = step.get("result")
    if not isinstance(result, dict):
        return str(result or "").replace("|", "/")
    above = "; ".join(result.get("failed", ()))
    flat = {key: value for key, value in result.items() if isinstance(value, int | float | str)}
    return above or ", ".join(f"{key} {_short(value)}" for key, value in flat.items())


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


def other_versions(found: Mapping[str, Any]) -> list[str]:
    """What differs from the versions that the first hour was rehearsed with."""
    names = ("python", "torch", "triton", "cuda")
    return [
        f"{name} {found.get(name)} instead of {DEVICE[name]}" for name in names
        if not f"{found.get(name)}.".replace("+", ".").startswith(f"{DEVICE[name]}.")
    ]  # fmt: skip


def commit_of(folder: Path) -> str:
    """What tells these sources from others: the commit, from a variable where there is no `.git`;
    else, and with local changes, a digest of the sources."""
    if told := os.environ.get(COMMIT):
        return told
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", f"--dirty={CHANGED}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    commit = done.stdout.strip()
    if commit and not commit.endswith(CHANGED):
        return commit
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder).as_posix()
        if not re.match(r"\.|build/", name):  # environments
            digest.update(f"{name}\0".encode() + path.read_bytes())
    return f"{commit or 'no commit'}, sources {digest.hexdigest()[:12]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=", ".join(PARTS) + "; all by default")
    parser.add_argument("--results", type=Path, default=Path("gpu-results"), help="the folder")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps")
    parser.add_argument("--small", action="store_true", help="sizes for the stand-in")
    parser.add_argument("--again", action="store_true", help="repeat what has passed")
    parser.add_argument("--list", action="store_true", help="name the steps and end")
    parser.add_argument("--table", action="store_true", help="print the results as a table and end")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if options.table:
        print(table(options.results))
        return 0
    facts = device_facts()
    plan = steps(options.small, facts["devices"], options.results)
    if options.list:
        print(*(f"{s.part} {s.name:26} {s.limit_s:4} s  {s.shows}" for s in plan), sep="\n")
        return 0
    if not facts["devices"]:
        raise SystemExit("torch sees no CUDA device")
    print(*other_versions({**versions(), **facts}), sep="\n")
    options.results.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in options.parts or PARTS:
        record = {
            "part": name, "date": datetime.now(UTC).date().isoformat(), "commit": commit_of(ROOT),
            **facts, "machine": machine_facts(), "versions": versions(), "small": options.small,
        }  # fmt: skip
        chosen = [s for s in plan if s.part == name and s.name in (options.only or [s.name])]
        results = run_part(chosen, options.results / f"{name}.json", record, options.again)
        lost = [each["step"] for each in results if each["status"] not in ("passed", "not run")]
        if lost:
            print(f"part {name}, {', '.join(lost)}: {PARTS[name].if_it_fails}")
        failed += lost
    print(f"{len(failed)} steps failed:", *failed)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
