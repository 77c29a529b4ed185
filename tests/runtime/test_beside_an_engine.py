"""An engine that imports, compiles and forks while a verification of its process begins."""

import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.compile, pytest.mark.slow]

PROGRAM = """
import os, sys, time, torch
import piecegraph as pg
torch.set_num_threads(1)
folder, moment, call = sys.argv[1:]
config = pg.Config(inputs={"x": "float32[num_tokens, 8]"}, max_num_tokens=16, graph_mode="NONE",
                   cache_dir=folder)

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def child():
    if not (pid := os.fork()):
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        prepared = pg.prepare(Model(), config)
        prepared.capture()
        os._exit(prepared.wait_until_verified(300) is not True)
    assert os.waitpid(pid, 0)[1] == 0

if call == "build":
    assert pg.compile_ahead(Model(), config)
    sys.exit()
prepared = pg.prepare(Model(), config)
assert prepared.report()["cache"]["hit"] and "torch._dynamo" not in sys.modules
prepared.capture()
time.sleep(float(moment))
exec(call)
torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
assert prepared.wait_until_verified(300) is True, prepared.wait_until_verified(0)
assert prepared.report()["counters"]["dynamo_traces"] > 0
"""

CALLS = (
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
    "import torch._inductor.utils",
    "import torch.export, torch.fx.experimental.proxy_tensor",
    "torch.use_deterministic_algorithms(False)",
    "child()",
)
OFTEN = {(0.1, "child()"), (0.8, "import torch._inductor.utils")}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory):
    folder = tmp_path_factory.mktemp("libraries")
    run(folder, 0, "build")
    return folder


def run(folder, moment, call):
    given = [sys.executable, "-c", PROGRAM, str(folder), str(moment), call]
    environ = {name: value for name, value in os.environ.items() if name != "PIECEGRAPH_OFF"}
    done = subprocess.run(given, capture_output=True, text=True, timeout=200, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("moment", "call"),
    [
        pytest.param(at, call, marks=[pytest.mark.heavy] * ((at, call) not in OFTEN))
        for at in (0.1, 0.8)
        for call in CALLS
    ],
)
def test_neither_the_engine_nor_the_verification_fails(libraries, moment, call):
    run(libraries, moment, call)
