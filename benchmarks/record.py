"""Run a benchmark that prints JSON, and write its result with the facts of the machine.

python benchmarks/record.py benchmarks/step-cpu.json -- python -m benchmarks step --quick --json -
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("--note", default="", help="what a reader must know")
    parser.add_argument("command", nargs="+", help="after --: the benchmark, printing JSON")
    arguments = parser.parse_args()
    record: dict[str, Any] = {
        "benchmark": shlex.join(arguments.command),
        "commit": _output("git", "rev-parse", "--short=12", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine_facts(),
        "versions": versions(),
    }
    done = subprocess.run(arguments.command, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        return done.returncode
    record["result"] = json.loads(done.stdout)
    record["note"] = arguments.note
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0


def machine_facts() -> dict[str, Any]:
    """What a timing depends on; `None` where it cannot be read."""
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.processor() or None,
        "cores": len(os.sched_getaffinity(0)),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load": round(os.getloadavg()[0], 2),
        "gpu": _output("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "system": platform.platform(),
    }


def versions() -> dict[str, str | None]:
    names = ("piecegraph", "torch", "triton")
    return {"python": platform.python_version(), **{name: _version(name) for name in names}}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(path: str, name: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), None)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else None


if __name__ == "__main__":
    sys.exit(main())
