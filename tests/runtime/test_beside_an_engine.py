"""An engine that imports, compiles and forks while a verification of its process begins."""

import json
import os

import pytest

from tests.processes import PYTHON, output_of

pytestmark = [pytest.mark.compile, pytest.mark.slow]

PROGRAM = """
from piecegraph.tests.quick_imports import end, imported
import json, os, sys, time, torch
import piecegraph as pg
from piecegraph.compile.ir import registered_compilers as registry
from piecegraph.tests.runtime.live.conftest import Texts
torch.set_num_threads(1)
config = pg.Config(inputs={"x": "float32[num_tokens, 8]"}, max_num_tokens=16, graph_mode="NONE",
                   compiler="texts", cache_dir=sys.argv[1])

registry.entry_points = lambda group: [Texts()]

class Model(torch.nn.Module):
    def forward(self, x):
        return torch.tanh(x)

def build():
    assert pg.prepare(Model(), config).compiled.traced

def child():
    pid = os.fork()
    if not pid:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        prepared = pg.prepare(Model(), config)
        prepared.capture()
        os._exit(prepared.wait_until_verified(300) is not True)
    assert os.waitpid(pid, 0)[1] == 0

def engine(moment, call):
    prepared = pg.prepare(Model(), config)
    assert prepared.report()["cache"]["hit"] and "torch._dynamo" not in sys.modules
    prepared.capture()
    time.sleep(moment)
    exec(call)
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert prepared.wait_until_verified(300) is True, prepared.wait_until_verified(0)
    assert prepared.report()["counters"]["dynamo_traces"] > 0

imported()
for begin in (build, *(lambda each=each: engine(*each) for each in json.loads(sys.argv[2]))):
    pid = os.fork()  # each has this process, which has not traced, as its own
    if not pid:
        begin()
        sys.exit()
    assert os.waitpid(pid, 0)[1] == 0
end()
"""

CALLS = (
    "torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2))",
    "import torch._inductor.utils",
    "import torch.export, torch.fx.experimental.proxy_tensor",
    "torch.use_deterministic_algorithms(False)",
    "child()",
)
ALL = [(moment, call) for moment in (0.1, 0.8) for call in CALLS]


@pytest.mark.parametrize(
    "each", [ALL[4:5], pytest.param(ALL, marks=pytest.mark.heavy)], ids=["child", "all"]
)
def test_neither_the_engine_nor_the_verification_fails(tmp_path, each):
    environ = {name: value for name, value in os.environ.items() if name != "PIECEGRAPH_OFF"}
    program = PYTHON, "-c", PROGRAM, tmp_path, json.dumps(each)
    output_of(*program, timeout=200 * len(each), env=environ)
