"""Remove one protection of the cuda backend at a time: a test must fail for each.

`python mutants.py [TEXT]` in the environment of `make cuda-test`; TEXT selects some. A
mutant that no test notices is printed, and the exit status is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


class Mutant(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: str
    """The file of the tests that must notice it."""
    before: tuple[int, int] = (99, 0)
    """The torch version from which on torch itself does what the protection does."""


CUDA = "runtime/backends/cuda.py"
CAPTURES = "tests/cuda_stand_in/test_captures.py"
MEMORY = "tests/cuda_stand_in/test_memory.py"
SCENES = "tests/cuda_stand_in/test_scenes.py"
STEPS = "tests/cuda_stand_in/test_steps.py"
RUNTIME = "tests/runtime"
MUTANTS = [
    Mutant(
        "steps of two streams are not ordered",
        CUDA,
        "            current.wait_stream(self._last)\n",
        "            pass\n",
        SCENES,
    ),
    Mutant(
        "copies of inputs are done before they are queued",
        "runtime/capture/installed_graph.py",
        "        load(tensors)\n        copied()\n",
        "        copied()\n        load(tensors)\n",
        f"{RUNTIME}/test_delayed_work.py",
    ),
    Mutant(
        "captures on a stream of torch's pool",
        CUDA,
        "own_stream(self._device, current.priority)",
        "torch.cuda.Stream(self._device, priority=current.priority)",
        CAPTURES,
    ),
    Mutant(
        "workspaces of all streams are freed",
        CUDA,
        "        with torch.cuda.device(self._device):\n            torch.cuda.empty_cache()\n",
        "        with torch.cuda.device(self._device):\n"
        "            torch._C._cuda_clearCublasWorkspaces()\n"
        "            torch.cuda.empty_cache()\n",
        SCENES,
    ),
    Mutant(
        "workspaces of the engine's graphs are freed with a pool",
        "torch_compat/basics/cuda.py",
        "        if pools <= {(0, 0), tuple(pool)}:\n",
        "        if True:\n",
        SCENES,
        before=(2, 12),
    ),
    Mutant("no anchor", CUDA, "if pool.anchor is None:", "if False:", RUNTIME),
    Mutant(
        "captures on the current device",
        CUDA,
        "self._device = torch.cuda.current_device() if index is None else index",
        "self._device = torch.cuda.current_device()",
        CAPTURES,
    ),
    Mutant(
        "no recovery when a capture ends badly",
        CUDA,
        "            self._recover()\n            raise\n        self._close()",
        "            raise\n        self._close()",
        CAPTURES,
    ),
    Mutant(
        "no recovery of an aborted capture",
        CUDA,
        "            self._graph.capture_end()\n        self._recover()\n",
        "            self._graph.capture_end()\n",
        CAPTURES,
        before=(2, 13),
    ),
    Mutant(
        "a graph without nodes passes",
        CUDA,
        "if self._tracker.computed and not nodes:",
        "if False:",
        CAPTURES,
    ),
    Mutant(
        "a pool keeps its memory",
        CUDA,
        "            pool.anchor.reset()\n            pool.anchor = None\n",
        "            pass\n",
        MEMORY,
    ),
    Mutant(
        "probes keep their pool",
        "runtime/parts/strategies/forecast.py",
        "backend.release_pool(pool)",
        "backend.prepare()",
        MEMORY,
    ),
    Mutant(
        "dummy batches leave cached memory",
        "runtime/capture/session.py",
        "                backend.trim()\n",
        "                pass\n",
        MEMORY,
    ),
    Mutant(
        "tensors between segments are not held",
        "runtime/capture/recorder.py",
        "                self._session.hold(tensor)\n",
        "",
        RUNTIME,
    ),
    Mutant(
        "an op on the host runs the kernel of the device",
        "runtime/backends/ownership.py",
        """"CPU" if on_cpu else self._device""",
        "self._device",
        CAPTURES,
    ),
    Mutant(
        "a value on the host may change",
        "runtime/backends/ownership.py",
        "return tensor.is_cpu and not tensor.is_pinned()",
        "return False",
        SCENES,
    ),
    Mutant(
        "a captured graph is replayed in its capture",
        "runtime/capture/recorder.py",
        "            self.segments.append(Segment(SegmentKind.GRAPH",
        "            graph.replay()\n            self.segments.append(Segment(SegmentKind.GRAPH",
        CAPTURES,
    ),
    Mutant(
        "tensors from outside are not held",
        "runtime/backends/ownership.py",
        "held = tensor.untyped_storage(), tensor.dtype, place",
        "held = tensor.new_empty(0).untyped_storage(), tensor.dtype, place",
        RUNTIME,
    ),
    Mutant(
        "captures run on the engine's stream, whose workspace is outside of the pool",
        CUDA,
        "torch.cuda.stream(pool.stream)",
        "torch.cuda.stream(torch.cuda.Stream())",
        MEMORY,
    ),
    Mutant(
        "memory of other processes counts as ours",
        CUDA,
        "used = torch.cuda.memory_reserved(self._device)",
        "used = total - free",
        MEMORY,
    ),
    Mutant(
        "a plan gives away the memory of other processes",
        "runtime/parts/strategies/ledger.py",
        "other = unowned + sum(",
        "other = sum(",
        MEMORY,
    ),
    Mutant(
        "staging memory is filled before its copies",
        "tools/engine/engine.py",
        "self.copied.synchronize()",
        "pass",
        "tests/cuda_stand_in/test_overlap.py",
    ),
    Mutant(
        "metadata is copied from pageable memory",
        "tools/engine/metadata.py",
        'if device.type == "cuda" else host',
        "if False else host",
        STEPS,
    ),
]


def copy_of_the_project(folder: Path) -> None:
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    shutil.copytree(HERE / "built", folder / HERE.relative_to(ROOT) / "built", symlinks=True)
    (folder / ".typing").mkdir()
    (folder / ".typing" / "piecegraph").symlink_to("..")


def passes(folder: Path, *tests: str) -> bool:
    run = [sys.executable, str(folder / HERE.relative_to(ROOT) / "run.py"), "-m", "pytest"]
    options = ["-p", "tests.cuda_stand_in.plugin", "-m", "gpu and not slow", "-qx", "-W", "default"]
    environment = os.environ | {"PYTHONPATH": str(folder / ".typing"), "STAND_IN_DEVICES": "2"}
    command = [*run, *options, "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, timeout=900
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def main() -> int:
    survivors = []
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    named = sys.argv[1] if len(sys.argv) > 1 else ""
    mutants = [each for each in MUTANTS if version < each.before and named in each.what]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_project(folder)
        if not passes(folder, *{mutant.tests for mutant in mutants}):
            print("the tests fail without a mutant")
            return 1
        for mutant in mutants:
            path = folder / mutant.file
            source = path.read_text()
            if source.count(mutant.old) < 1:
                print(f"not found in {mutant.file}: {mutant.old!r}")
                return 1
            path.write_text(source.replace(mutant.old, mutant.new, 1))
            noticed = not passes(folder, mutant.tests)
            path.write_text(source)
            print(f"{'noticed ' if noticed else 'SURVIVED'}  {mutant.what}", flush=True)
            survivors += [] if noticed else [mutant.what]
    print(f"torch {torch.__version__}: {len(mutants) - len(survivors)} of {len(mutants)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
