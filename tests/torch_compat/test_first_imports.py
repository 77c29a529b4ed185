"""First imports of torch's compilers, and switches that no test could put back.

Each case is a fork of one process that has imported torch alone.
"""

import json

import pytest

from tests.processes import PYTHON, output_of

PROGRAM = """
from piecegraph.tests.quick_imports import end
import json, os, sys, threading, traceback
import torch
from concurrent.futures import ThreadPoolExecutor
from piecegraph.torch_compat.basics import settings
from piecegraph.torch_compat.basics.tensors import LightDispatchMode
from piecegraph.torch_compat.compiling import inductor
from piecegraph.torch_compat.tracing.first_imports import import_alone, import_tracer

def states(change, value):
    before = settings.global_state()
    exec(f"{change} = {value!r}")
    stated = set(settings.global_state().items()) - set(before.items())
    assert value in dict(stated).values()

class Mode(LightDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))

def light_mode():
    with Mode():
        torch.ones(2) + 1
    assert "torch._dynamo" not in sys.modules

def two_threads():
    started = threading.Event()
    names = {"torch._dynamo.convert_frame", "torch._inductor.graph"}
    assert not names & sys.modules.keys()

    def other():
        started.wait()
        inductor.import_inductor()
        return torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item()

    with ThreadPoolExecutor() as pool:
        result = pool.submit(other)
        import_alone(lambda: (started.set(), import_tracer()), lambda: None)
        assert "torch._dynamo.convert_frame" in sys.modules
        assert result.result(120) == 2.0
    assert names <= sys.modules.keys()

cases = {
    "precision of products": lambda: states("torch.backends.cuda.matmul.fp32_precision", "tf32"),
    "precision": lambda: states("torch.backends.fp32_precision", "tf32"),
    "precision of mkldnn": lambda: states("torch.backends.mkldnn.matmul.fp32_precision", "bf16"),
    "light mode": light_mode,
    "two threads": two_threads,
}
failed = {}
for name, case in cases.items():
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            case()
        except BaseException:
            os.write(writer, traceback.format_exc()[-2000:].encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as text:
        failed[name] = text.read()
    os.wait()
print(json.dumps(failed))
end()
"""


@pytest.mark.slow
def test_in_a_process_that_has_imported_torch_alone():
    """Older getters of torch raised; a light mode imports no Dynamo; what is imported is there; two
    threads that import first get whole modules."""
    failed = json.loads(output_of(PYTHON, "-c", PROGRAM))
    assert failed == dict.fromkeys(failed, "")
    assert len(failed) == 5
