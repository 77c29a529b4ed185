"""Run Python with the stand-in instead of the CUDA runtime: `python run.py ARGUMENT…`.

`python run.py -m pytest …` runs tests; `python run.py main …` is the `piecegraph` command with
values for the kernels (add TRITON_INTERPRET=1 for those of Inductor). With STAND_IN_VALUES=1 the
kernels have values in every process that is started.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from build import BUILT, headers, toolkit_headers

COMMAND = """
import os, sys
from tests.cuda_stand_in import values
kept = values.install()
if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.cuda_stand_in import triton_values
    triton_values.install()
from piecegraph.__main__ import main
status = main()
sys.exit(status or (1 if values.errors else 0))
"""


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["main"]:
        arguments = ["-c", COMMAND, *arguments[1:]]
    preload = f"{BUILT / 'libcudart.so.13'}:{BUILT / 'libcuda.so.1'}"
    root = Path(__file__).parents[2]
    here = Path(__file__).parent / "site"
    path = os.pathsep.join(map(str, filter(None, [here, root, os.environ.get("PYTHONPATH")])))
    environment = os.environ | {
        "LD_PRELOAD": preload,
        "LD_LIBRARY_PATH": str(BUILT),
        "LIBRARY_PATH": str(BUILT),  # AOTInductor links with -lcuda
        "CPATH": os.pathsep.join(map(str, [headers(), toolkit_headers()])),
        "PYTHONPATH": path,
    }
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    main()
