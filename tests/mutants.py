"""Remove one protection at a time and see a test fail: `make mutants`, not part of CI.

Each mutant is (file, text, replacement, tests). A mutant that its tests let pass is a protection
without a test. Files are restored after each run.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIVE = "tests/runtime/live"
DUMMY, STRIDES, RESULTS = (f"{LIVE}/test_{n}.py" for n in ("dummy_batch", "strides", "results"))
WEIGHTS, FAITHFUL = (f"{LIVE}/test_{n}.py" for n in ("weights", "faithful_replay"))
CAPTURE, STEP, BACKENDS = "runtime/capture", "runtime/step", "runtime/backends"
GRAPHS, BATCH = f"{CAPTURE}/captured_graphs.py", f"{CAPTURE}/dummy_batch.py"
ADDRESSES, INPUTS = f"{STEP}/address_checks.py", f"{STEP}/static_inputs.py"

MUTANTS = [
    (BATCH, "self.inputs.fill_padding()", "pass", f"{DUMMY} -k between"),
    (BATCH, "*self.state]", "]", f"{DUMMY} -k True"),
    (BATCH, "[*self.inputs.owned, ", "[", f"{DUMMY} -k True"),
    (GRAPHS, "if self._laid_out(*tensors):", "if True:", f"{STRIDES} -k relies"),
    (INPUTS, "if any_layout or (laid_out and whole):", "if True:", f"{STRIDES} -k copied"),
    (INPUTS, "if tensor.stride() != captured.stride() and not", "if False and not",
     f"{STRIDES} -k first_byte"),
    (GRAPHS, "(normal_alias(result) if result.is_inference() else result).detach",
     "partial(_same, result)", RESULTS),
    (GRAPHS, "del self._by_size[next(iter(self._by_size))]", "pass", f"{RESULTS} -k bounded"),
    ("runtime/prepared_model.py", "if is_autocast_enabled():", "if False:",
     f"{RESULTS} -k autocast"),
    ("runtime/prepared_model.py", "self._graphs.close()", "pass", f"{RESULTS} -k close"),
    (ADDRESSES, "if now is not None:\n                return address(now)\n", "", WEIGHTS),
    (ADDRESSES, "if then is not None and tensor.numel()", "if False", f"{WEIGHTS} -k failure_12"),
    (f"{BACKENDS}/replay.py", "if self._options.poison_before_replay:", "if False:",
     "tests/runtime/test_replay_backend.py -k failure_27"),
    (f"{BACKENDS}/tape.py", "if reads.found is not None:", "if False:", f"{FAITHFUL} -k host"),
    (f"{CAPTURE}/recorder.py", "if self._context is not None:", "if False:",
     f"{FAITHFUL} -k failure_23"),
]  # fmt: skip


def survives(file: str, text: str, replacement: str, tests: str) -> bool:
    """Whether `tests` pass with `text` replaced in `file`."""
    path = ROOT / file
    original = path.read_text()
    if original.count(text) < 1:
        raise SystemExit(f"{file} no longer has {text!r}: correct the list of mutants")
    path.write_text(original.replace(text, replacement, 1))
    try:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        return (
            subprocess.run([*command, *tests.split()], cwd=ROOT, capture_output=True).returncode
            == 0
        )
    finally:
        path.write_text(original)


def main() -> None:
    survivors = []
    for mutant in MUTANTS:
        survived = survives(*mutant)
        survivors += [mutant] if survived else []
        print("survived" if survived else "caught  ", mutant[0], repr(mutant[1]), flush=True)
    raise SystemExit(len(survivors))


if __name__ == "__main__":
    main()
