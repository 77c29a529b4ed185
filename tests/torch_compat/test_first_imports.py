"""Imports of torch's compilers that no other thread is inside of."""

import subprocess
import sys

PROGRAM = """
import sys, threading, torch
from piecegraph.torch_compat.tracing.first_imports import import_alone, import_tracer
from concurrent.futures import ThreadPoolExecutor

started = threading.Event()

def other():
    started.wait()
    import torch._inductor.compile_fx
    return torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()

with ThreadPoolExecutor() as pool:
    result = pool.submit(other)
    import_alone(lambda: (started.set(), import_tracer()), lambda: None)
    assert "torch._dynamo" in sys.modules
    print(result.result(120))
"""


def test_two_threads_that_import_first_get_whole_modules():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert run.stdout == "2.0\n", run.stderr[-800:]
