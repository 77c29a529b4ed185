"""Ranges of profilers name steps, graphs, pieces and ops; time is added up by them."""

import json

import pytest
import torch

import piecegraph as pg
from piecegraph.compile.plan.step_names import call_names, piece_names
from piecegraph.errors import InvalidArgument, InvalidSetting
from piecegraph.runtime.backends.protocol import Argument
from piecegraph.tools.explain.graph_nodes import (
    _between,
    _nodes,
    _what,
    find_graph,
    graph_facts,
    rendered_graph,
)
from piecegraph.tools.explain.kernel_times import profile_section, time_by_range

from .conftest import started


def event(cat, name, ts, dur, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def test_kernels_belong_to_the_range_of_their_launch(tmp_path):
    trace = {
        "traceEvents": [
            event("user_annotation", "step PIECEWISE 8 exact", 0, 100),
            event("user_annotation", "piece 1 layers 0-1", 10, 20),
            event("user_annotation", "piece 1 layers 1-2", 50, 10),
            event("user_annotation", "op attention layer 1", 35, 10),
            event("cuda_runtime", "launch", 12, 2, correlation=1),
            event("cuda_runtime", "launch", 52, 2, correlation=2),
            event("cuda_driver", "launch", 36, 2, correlation=3),
            event("cuda_runtime", "launch", 90, 2, correlation=4),
            event("kernel", "fused", 200, 30, tid=7, correlation=1),
            event("kernel", "fused", 240, 40, tid=7, correlation=2),
            event("kernel", "flash", 220, 15, tid=7, correlation=3),
            event("kernel", "outside", 280, 99, tid=7, correlation=4),
            {"ph": "i", "name": "else", "ts": 0},
        ]
    }
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    piece, op = time_by_range(tmp_path / "trace.json")
    assert (piece.name, piece.calls, piece.host, piece.device) == ("piece 1", 2, 30, 70)
    assert piece.kernels == {"fused": 70}
    assert (op.name, op.calls, op.device) == ("op attention", 1, 15)
    (table,) = profile_section([piece, op]).tables
    assert table.rows[0] == ("piece 1", 2, "0.03", "0.07", "82.4%", "fused")


def test_a_file_that_is_no_trace_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("no")
    with pytest.raises(InvalidSetting):
        time_by_range(tmp_path / "a.json")


@pytest.mark.compile
def test_w24_pieces_and_ops_are_named_by_their_layers_and_only_while_ranges_are_on(make_decoder):
    prepared, step = make_decoder
    plan = prepared.compiled.plan
    assert piece_names(plan) == ["piece 0 layer 0", "piece 1 layers 0-1", "piece 2 layer 1"]
    assert call_names(plan) == ["op paged_attention layer 0", "op paged_attention layer 1"]
    stitched = prepared._core.steps.code.call
    prepared.parts.log.profiler_ranges()
    with torch.profiler.profile() as profiler:
        for batch in (pg.Batch(2, 1), pg.Batch(3, 1), pg.Batch(2, 2, True, 1)):
            step(batch)
    prepared.parts.log.profiler_ranges(on=False)
    names = [
        each.name
        for each in profiler.events()
        if each.name.startswith(("step ", "piece ", "graph ", "op "))
    ]
    assert sorted(names) == sorted(
        [
            *2 * [*piece_names(plan), *call_names(plan)],
            "graph FULL 2",
            "step FULL 2 exact",
            "step NONE 3 above largest size",
            "step PIECEWISE 2 exact",
        ]
    )
    with torch.profiler.profile() as profiler:
        step(pg.Batch(2, 1))
    assert not [each for each in profiler.events() if each.name.startswith(("step ", "piece "))]
    assert prepared._core.steps.code.call is not stitched


@pytest.mark.compile
def test_vllm_45069_each_capture_has_a_trace_and_its_graph_a_table(make_decoder, tmp_path):
    prepared, _ = make_decoder
    operations = {recording.name: recording.operations for _, recording in prepared.recordings()}
    assert operations["PIECEWISE 2"] == len(prepared.compiled.plan.steps)  # no range among them
    prepared.release()
    prepared.capture(profile_dir=tmp_path / "traces")
    assert {r.name: r.operations for _, r in prepared.recordings()} == operations
    assert {path.name for path in tmp_path.rglob("*")} == {
        "traces", "FULL_2.json", "PIECEWISE_2.json",
    }  # fmt: skip
    prepared.release()
    (tmp_path / "traces/FULL_2.json").rename(tmp_path / "FULL_2.json")
    prepared.capture()
    assert not (tmp_path / "traces/FULL_2.json").exists()

    facts = graph_facts(prepared, find_graph(prepared, "full:2"), tmp_path)
    plan, parts = prepared.compiled.plan, facts["parts"]
    assert [part["part"] for part in parts] == [
        "piece 0 layer 0", "op paged_attention layer 0", "piece 1 layers 0-1",
        "op paged_attention layer 1", "piece 2 layer 1",
    ]  # fmt: skip
    first = parts[0]["takes"]
    assert {"input input_ids", "input positions", "weight embedding.weight"} <= {*first.values()}
    assert {*parts[1]["takes"].values()} == {"intermediate"}
    assert len(parts[0]["takes"]) == len(plan.steps[0].args)
    assert parts[0]["nodes"][0]["op"] == "aten::embedding"
    assert parts[0]["nodes"][0]["shapes"][1] == [2]
    assert "addmm" not in str(parts)  # linear calls it
    assert [node["op"].rpartition("::")[2] for node in parts[1]["nodes"]] == ["paged_attention"]
    assert any(path.startswith("metadata.") for path in facts["reads"])
    operations = facts["operations"]
    assert len(operations) == dict(prepared.recordings())[find_graph(prepared, "full:2")].operations
    assert {each["part"] for each in operations} == {part["part"] for part in parts}
    reads = {(each["op"], a["what"]) for each in operations for a in each["arguments"]}
    assert {what.partition(" ")[0] for _, what in reads} == {
        "input", "weight", "metadata", "state", "intermediate",
    }  # fmt: skip
    assert {
        ("compiled piece", "input input_ids"), ("compiled piece", "weight embedding.weight"),
        ("aten.index_copy_.default", "state keys of layers.1.attention"),
        ("aten.index_copy_.default", "metadata slot_mapping"),
    } <= reads  # fmt: skip
    own = prepared.parts.log.memory[find_graph(prepared, "full:2")]
    for place in [at for at, what in own.items() if what.endswith(" slot_mapping")]:
        del own[place]
    again = graph_facts(prepared, find_graph(prepared, "full:2"), tmp_path)
    assert "unknown" in [a["what"] for each in again["operations"] for a in each["arguments"]]
    table = rendered_graph({**facts, "unknown": ["float32[3]"]}, "md")
    assert "|  |  |  | metadata slot_mapping | [2] |" in table
    assert "| piece 0 layer 0 | aten::embedding | [[32, 16], [2]] |  |" in table
    assert "| float32[3] | unknown: no step checks its address |" in table
    assert json.loads(rendered_graph(facts, "json")) == facts
    with pytest.raises(InvalidSetting, match="PIECEWISE:2, FULL:2"):
        find_graph(prepared, "FULL:4")
    with pytest.raises(InvalidArgument, match="profile_dir"):
        prepared.parts.log.profile_captures(tmp_path / "FULL_2.json")


def test_memory_has_the_name_of_the_tensor_that_begins_last_before_the_address():
    memory = {range(100, 200): "weight all", range(140, 200): "state keys of layer 1"}
    addresses = [(120, True), (140, False), (199, False), (200, True), (99, False)]
    assert [_what(Argument(at, is_made, None), memory) for at, is_made in addresses] == [
        "weight all", "state keys of layer 1", "state keys of layer 1", "intermediate", "unknown",
    ]  # fmt: skip


@pytest.mark.compile
def test_splitting_ops_in_a_row_are_one_part(make_decoder):
    prepared, _ = make_decoder
    plan = prepared.compiled.plan
    names = ["", "op paged_attention layer 0", "op paged_attention layer 1", ""]
    assert _between(plan) == names
    both = plan.model_copy(
        update={"steps": [step for step in plan.steps if step is not plan.steps[2]]}
    )
    assert _between(both) == ["", ", ".join(names[1:3]), ""]


def test_kernels_belong_to_the_operator_that_launches_them(tmp_path):
    events = [
        event("user_annotation", "piece 0", 0, 100),
        event("cpu_op", "aten::linear", 10, 50, **{"Input Dims": [[2, 4], [4, 4], []]}),
        event("cpu_op", "aten::addmm", 12, 40),
        event("cuda_runtime", "launch", 20, 2, correlation=7),
        event("cpu_op", "aten::mul", 70, 10),
        event("cpu_op", "aten::mul", 75, 4, tid=2),
        event("kernel", "gemm", 500, 9, tid=9, correlation=7),
        event("user_annotation", "piece 0", 200, 10),  # the capture itself
        event("cpu_op", "aten::zero", 201, 1),
    ]
    (nodes,) = _nodes([*reversed(events), {"ph": "i", "ts": 0}], ["piece 0"])
    assert nodes == [
        {"op": "aten::linear", "shapes": [[2, 4], [4, 4]], "kernels": ["gemm"]},
        {"op": "aten::mul", "shapes": [], "kernels": []},
    ]


@pytest.fixture
def make_decoder():
    with started(model="layers=2,hidden=16,heads=2,vocab=32", capture_sizes="2") as engine:
        service, prepared = engine.service, engine.service.prepared

        def step(batch):
            decision = prepared.dispatch(batch)
            metadata = service.buffers.padding(decision.descriptor, decision.mode)
            ids = torch.zeros(batch.num_tokens, dtype=torch.int64)
            return prepared.run(decision, ids, ids, metadata=metadata)

        yield prepared, step


@pytest.mark.compile
def test_the_command_prints_time_by_piece(tmp_path, capsys):
    from piecegraph.tools.cli.app import main

    file = tmp_path / "profile.json"
    small = ["--model", "layers=1,hidden=16,heads=2,vocab=32", "--requests", "1"]
    options = ["--backend", "eager", "--no-cache", "--capture-sizes", "1", "--output", str(file)]
    assert main(["profile", *small, *options]) == 0
    out = capsys.readouterr().out
    for part in ("piece 0", "piece 1", "op paged_attention", "graph FULL 1"):
        assert part in out
    assert json.loads(file.read_text())["traceEvents"]
