"""The nodes of captured graphs: who added each, and what memory it has."""

import ctypes
import json
from itertools import groupby

import pytest
import torch

import piecegraph as pg
from piecegraph.runtime.backends.cuda import CudaBackend
from piecegraph.runtime.backends.cuda_nodes import NodeLog
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session
from piecegraph.tools.explain.graph_nodes import (
    _node_text,
    find_graph,
    graph_facts,
    rendered_graph,
)
from piecegraph.torch_compat.basics.cuda import driver
from tests.ops import define

from .models import _OPS, Model, prepared

_SHIFT: list[torch.Tensor] = []


def launched(query, output, layer_name):
    output.zero_()
    torch.add(query, _SHIFT[0], out=output)


SCHEMA = "shifted(Tensor query, Tensor(a!) output, str layer_name) -> ()"
define(_OPS, SCHEMA, lambda *arguments: launched(*arguments))


class Shifted(Model):
    """Its op reads memory that no step knows of."""

    def forward(self, x):
        query = torch.nn.functional.gelu(self.before(x))
        output = torch.empty_like(query)
        torch.ops.standin.shifted(query, output, "layers.0.attention")
        return self.after(torch.relu(output) + 1.0)


@pytest.fixture
def shifted():
    _SHIFT[:] = [torch.ones(64, device="cuda")]
    layers = {"layers": {"layers.0.attention": None}}
    model = prepared(
        hidden=16, model=Shifted(16), given=layers, splitting_ops=("standin::shifted",),
        max_num_tokens=64, capture_sizes=(8,), graph_mode="FULL_AND_PIECEWISE",
    )  # fmt: skip
    yield model
    model.close()
    _SHIFT.clear()


def launch_hidden_kernel():
    function, module = ctypes.c_void_p(), ctypes.c_void_p()
    driver("cuModuleLoadData", ctypes.byref(module), None)
    driver("cuModuleGetFunction", ctypes.byref(function), module, b"hidden_kernel")
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    driver("cuLaunchKernel", function, 4, 1, 1, 32, 1, 1, 0, stream, None, None)


def whats(node):
    return [argument["what"] for argument in node["arguments"]]


def test_nodes_have_operator_part_and_memory_by_name_and_what_nobody_knows_is_unknown(
    shifted, tmp_path
):
    shifted.capture(profile_dir=tmp_path)
    facts = graph_facts(shifted, find_graph(shifted, "FULL:8"), tmp_path)
    nodes = facts["operations"]
    recordings = {recording.name: recording for _, recording in shifted.recordings()}
    assert len(nodes) == recordings["FULL 8"].operations
    parts = [part for part, _ in groupby(nodes, lambda node: node["part"])]
    assert parts == ["piece 0", "op shifted layer 0", "piece 1"]
    ops = [op for op, _ in groupby(nodes, lambda node: node["op"])]
    assert ops == [
        "aten.addmm.default", "aten.gelu.default", "aten.zero_.default", "aten.add.out",
        "aten.relu.default", "aten.add.Tensor", "aten.addmm.default",
    ]  # fmt: skip
    first, add, last = (next(n for n in nodes if n["op"] == op) for op in (ops[0], ops[3], ops[-1]))
    assert {"input x", "weight before.weight", "intermediate"} <= {*whats(first)}
    assert {"weight after.weight", "intermediate"} <= {
        what for node in nodes if node["part"] == "piece 1" for what in whats(node)
    }
    assert last["launch"]["grid"]
    # the tensor of the module that no step knows: in the node of the op that reads it, and nowhere
    assert {"what": "unknown", "shape": [64]} in add["arguments"]
    assert [node["op"] for node in nodes if "unknown" in whats(node)] == ["aten.add.out"]
    assert facts["unknown"] == ["a tensor: float32[64]"]
    table = rendered_graph(facts, "md")
    assert f"aten.add.out | {_node_text(add)} | intermediate | [8, 64] |" in table
    assert "|  |  |  | unknown | [64] |" in table
    assert json.loads(rendered_graph(facts, "json")) == facts

    # of breaks there is no node; the parts of the other graph keep their names
    facts = graph_facts(shifted, find_graph(shifted, "PIECEWISE:8"), tmp_path)
    assert {node["part"] for node in facts["operations"]} == {"piece 0", "piece 1"}
    shifted.release()
    shifted.capture()
    (graph,) = next(r.graphs for _, r in shifted.recordings() if r.name == "FULL 8")
    assert graph.parts == ()  # nothing is noted for a capture without a profile


def test_kernel_whose_parameters_the_driver_does_not_tell_is_named_and_unknown(
    shifted, tmp_path, stand_in, monkeypatch
):
    """And a copy, a fill, a function of the host, and work of a second stream, in order."""
    runtime, other = ctypes.CDLL("libcudart.so.13"), torch.cuda.Stream()

    def launches(query, output, layer_name):
        current = torch.cuda.current_stream()
        stream = ctypes.c_void_p(current.cuda_stream)
        at, to = ctypes.c_void_p(query.data_ptr()), ctypes.c_void_p(output.data_ptr())
        runtime.cudaMemsetAsync(to, 0, ctypes.c_size_t(64), stream)
        runtime.cudaMemcpyAsync(to, at, ctypes.c_size_t(128), 3, stream)
        launch_hidden_kernel()
        other.wait_stream(current)
        with torch.cuda.stream(other):
            output.mul_(2)
        current.wait_stream(other)
        _SHIFT[0].add_(1)

    monkeypatch.setattr(f"{__name__}.launched", launches)
    shifted.capture(profile_dir=tmp_path)
    facts = graph_facts(shifted, find_graph(shifted, "FULL:8"), tmp_path)
    rows = [each for each in facts["operations"] if each["part"] == "op shifted layer 0"]
    assert [(row["op"], row["node"], row["launch"].get("bytes")) for row in rows] == [
        ("standin.shifted.default", "memset", 64),
        ("standin.shifted.default", "memcpy", 128),
        ("standin.shifted.default", "kernel", None),
        ("aten.mul_.Tensor", "kernel", None),
        ("aten.add_.Tensor", "kernel", None),
    ]
    hidden = rows[2]
    assert (hidden["kernel"], hidden["launch"]) == (
        "hidden_kernel", {"grid": [4, 1, 1], "block": [32, 1, 1]},
    )  # fmt: skip
    assert whats(hidden) == ["unknown: cuFuncGetParamInfo returned CUDA driver error 801"]
    assert whats(rows[1]) == ["intermediate", "intermediate"]
    assert whats(rows[4])[0] == "unknown"


def test_kernels_that_no_operator_launches_are_nodes_too(stand_in):
    backend = CudaBackend()
    backend.notes_nodes = True
    x = torch.ones(8, device="cuda")

    def launches(x):
        launch_hidden_kernel()
        y = x * 2
        launch_hidden_kernel()
        return y

    with torch.no_grad(), capture_session(backend, backend.new_pool(), pg.Events()) as session:
        recording = record(launches, (x,), session, name="test", breaks=False)
    (part,) = recording.graphs[0].parts
    nodes = [(node.op, node.kernel) for node in part.nodes]
    assert nodes == [
        ("", "hidden_kernel"), ("aten.mul.Tensor", "aten::mul.Tensor"), ("", "hidden_kernel"),
    ]  # fmt: skip
    recording.release()


def test_an_operator_in_which_a_capture_ended_has_no_nodes_of_the_next_graph():
    x, log = torch.ones(8, device="cuda"), NodeLog()
    graphs = [torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()]
    operator = log.during(("splits", [x]))
    with torch.cuda.graph(graphs[0]):
        operator.__enter__()
        x.add_(1)
        log.end()
    with torch.cuda.graph(graphs[1]):
        x.mul_(2)
        x.mul_(2)
        operator.__exit__(None, None, None)
    (node,) = [node for part in log.parts(graphs[0].pool()) for node in part.nodes]
    assert node.op == "splits"
    assert (x.data_ptr(), [8]) in [(each.address, each.shape) for each in node.arguments]
