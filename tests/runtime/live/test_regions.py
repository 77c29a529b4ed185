"""Regions that a model which is not traced compiles itself with `torch.compile`."""

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from piecegraph import (
    Batch,
    ForwardContext,
    break_graph,
    forward_context,
    get_forward_context,
)
from piecegraph.errors import WorkAfterSeal
from piecegraph.torch_compat.basics.tensors import LightDispatchMode
from tests.processes import output_of

from ..conftest import captured

pytestmark = pytest.mark.compile


@break_graph
def attend(x, out):
    out.copy_(x.cumsum(0) * get_forward_context().metadata["scale"].item())


def activation(x):
    return torch.nn.functional.silu(x) * 2


def broken(x):
    """A region with a break, at which Dynamo leaves it."""
    out = torch.empty_like(x)
    attend(x * 2, out)
    return out + 1


class Regions(nn.Module):
    """Compiles functions and a method that writes to its argument, and has a nested region."""

    def __init__(self, with_break=False, **options):
        super().__init__()
        self.with_break = with_break
        torch._dynamo.reset()
        self.weight = nn.Parameter(torch.rand(4, 4), requires_grad=False)
        self.act = torch.compile(activation, fullgraph=True, **options)
        self.norm = torch.compile(self.normed, **options)
        self.last = torch.compile(broken, **options)

    def normed(self, x):
        x.add_(1)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    @torch.compiler.nested_compile_region
    def nested(self, x):
        return x.sin() + 1

    def forward(self, x):
        for _ in range(2):
            y = self.nested(self.act(self.norm(x + 0) @ self.weight))
            out = torch.empty_like(y)
            attend(y, out)
            x = x + out
        return self.last(x) if self.with_break else x


def prepared_for(model, **settings):
    metadata = {"scale": torch.tensor(1.0)}
    settings = {"compile": False, "graph_mode": "PIECEWISE", **settings}
    return captured(
        model, 16, metadata_for=lambda *_: metadata, capture_sizes=(2, 4, 8), **settings
    )


def is_right(prepared, model, size):
    """The mode of a step whose result is that of the model run uncompiled."""
    metadata = {"scale": torch.tensor(3.0)}
    x = torch.randn(size, 4)
    decision = prepared.dispatch(Batch(size, 1))
    result = prepared.run(decision, x, metadata=metadata)
    uncompiled = torch.compiler.set_stance("force_eager")
    with forward_context(ForwardContext({}, metadata)), torch.no_grad(), uncompiled:
        torch.testing.assert_close(result, model(x))
    return decision.mode.name


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.heavy)])
def test_regions_are_compiled_for_what_is_captured_and_no_frame_of_ours_is_traced(backend):
    traced = []

    def note(code, compiled):
        traced.append(f"{code.co_filename}:{code.co_name}")

    hook = torch._dynamo.convert_frame.register_bytecode_hook(note)
    try:
        model = Regions(with_break=True, backend=backend)
        prepared = prepared_for(model)
        assert {name.partition(":")[0] for name in traced} == {__file__}
        names = {name.partition(":")[2].split("_at_")[0] for name in traced}
        assert names == {"activation", "normed", "broken", "torch_dynamo_resume_in_broken"}
        captured = len(traced)
        assert [is_right(prepared, model, n) for n in (3, 8, 12)] == [*["PIECEWISE"] * 2, "NONE"]
        assert len(traced) == captured  # code of any size was compiled for the captures
    finally:
        hook.remove()
    report = prepared.report()
    assert {"activation", "normed"} < {each["function"] for each in report["regions"]}
    assert {each["where"].rpartition(":")[0] for each in report["regions"]} == {__file__}
    assert report["counters"]["dynamo_traces"] == captured


class Watching(LightDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_the_handler_of_a_mode_is_not_traced():
    """Dynamo leaves a region that is called under a dispatch mode, but not what it calls."""
    traced = []
    hook = torch._dynamo.convert_frame.register_bytecode_hook(
        lambda code, compiled: traced.append(code.co_name)
    )
    region = torch.compile(lambda x: x * 2, backend="eager")
    try:
        with Watching():
            region(torch.rand(3, 4))
    finally:
        hook.remove()
    assert traced == []


def test_a_region_that_is_compiled_after_the_seal_is_an_error_that_names_it():
    model = Regions(backend="eager", dynamic=False)
    prepared = prepared_for(model, steps={"after_seal": "raise"})
    prepared.seal()
    assert is_right(prepared, model, 4) == "PIECEWISE"
    with pytest.raises(WorkAfterSeal, match="Dynamo recompile of normed|normed at line"):
        prepared(torch.randn(12, 4), batch=Batch(12, 1), metadata={"scale": torch.tensor(1.0)})


PROGRAM = """
import json, sys
import torch
from tests.runtime.live.test_regions import Regions, is_right, prepared_for

torch.manual_seed(0)
model = Regions(dynamic=True)
prepared = prepared_for(model, cache_dir=sys.argv[1], cache={})
prepared.seal()
modes = [is_right(prepared, model, size) for size in (3, 8, 12)]
report = prepared.report()
generated = [each["generated"] for each in report["regions"]]
operations = prepared.recordings()[0][1].segments[0].operations
print(json.dumps([modes, report["counters"], generated, operations]))
"""


@pytest.mark.heavy
def test_a_second_start_has_the_code_of_regions_from_our_cache(tmp_path):
    def start():
        root = Path(__file__).parents[3]
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
        return json.loads(output_of(*command, cwd=root).splitlines()[-1])

    (modes, cold, generated, operations), (again, warm, loaded, _) = start(), start()
    assert operations == 6  # add, norm, matmul, act, two of `nested`: a region's code is one
    assert modes == again == ["PIECEWISE", "PIECEWISE", "NONE"]
    assert all(generated)
    assert cold["inductor_compiles"] == len(generated) > 0
    assert not any(loaded)
    assert warm["inductor_compiles"] == 0
    assert len(loaded) == len(generated)
    assert warm["cache.hit"] == 1
