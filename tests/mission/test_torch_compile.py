"""torch.compile in an engine: one trace, split at attention, compiled once, cached.

From vLLM's torch.compile integration (`VllmBackend`) and SGLang's piecewise compiler.
"""

import pytest
import torch

import piecegraph as pg
from piecegraph.errors import CaptureAfterSeal

from .conftest import HIDDEN, OP, Model, mode_of


def test_one_trace_serves_every_number_of_tokens(prepare):
    """vLLM: a full graph, dynamic in the token dimension."""
    prepared = prepare(graph_mode="NONE")
    assert [mode_of(prepared, n, False) for n in (1, 5, 16)] == ["NONE 1", "NONE 5", "NONE 16"]
    assert prepared.report()["counters"]["dynamo_traces"] == 1


def test_equal_pieces_are_compiled_once(prepare):
    """vLLM: `splitting_ops`; piecegraph compiles unique pieces."""
    pieces = prepare().report()["pieces"]
    assert pieces["total"] > pieces["unique"]


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A start that finds what `compile_ahead` left, and its report before it is verified."""
    import torch._inductor.config as inductor_config

    folder = tmp_path_factory.mktemp("cache")
    config = pg.Config(
        splitting_ops=(OP,), inputs={"x": f"float32[num_tokens, {HIDDEN}]"}, max_num_tokens=16,
        cache_dir=folder, graph_mode="NONE", cache={"verify_bundle": "background"},
    )  # fmt: skip
    # `patch.setattr` would leave the process without this setting
    quick = inductor_config.patch(
        {"aot_inductor.precompile_headers": False, "aot_inductor.compile_wrapper_opt_level": "O0"}
    )
    with quick, pytest.MonkeyPatch.context() as patch:
        assert pg.compile_ahead(Model(), config)
        patch.delenv("PIECEGRAPH_OFF", raising=False)  # the tests' own setting
        prepared = pg.prepare(Model(), config)
    return prepared, prepared.report()


@pytest.mark.compile
def test_a_warm_start_neither_traces_nor_compiles(warm):
    """vLLM: the AOT cache; TensorRT-LLM: build, then run."""
    prepared, report = warm
    assert report["cache"]["hit"] is True
    assert report["counters"]["inductor_compiles"] == 0
    assert mode_of(prepared, 3, False) == "NONE 3"


@pytest.mark.compile
def test_a_warm_start_is_verified(warm):
    """piecegraph: the bundle is compared with a new trace while the model serves."""
    warm[0].wait_until_verified()
    assert warm[0].report()["cache"]["verified"] is True


@pytest.mark.compile
def test_inductor_splits_its_own_code(prepare):
    """vLLM: `use_inductor_graph_partition`."""
    prepared = prepare(compiler="inductor", codegen={"partition": "inductor"})
    prepared.capture(None)
    assert prepared.compiled.plan.cut_at == (OP,)
    assert mode_of(prepared, 3, False) == "PIECEWISE 4"


@pytest.mark.compile
def test_some_sizes_are_compiled_by_themselves(prepare):
    """vLLM: `compile_sizes`."""
    prepared = prepare(compiler="inductor", codegen={"sizes": (4,)}, graph_mode="NONE")
    ranges = prepared.compiled.plan.ranges
    assert any((each.low, each.high) == (4, 4) for each in ranges)
    assert mode_of(prepared, 4, False) == "NONE 4"


@pytest.mark.compile
def test_a_user_changes_the_graph(prepare):
    """vLLM: custom passes."""
    seen = []

    def count(graph):
        seen.append(len(graph.nodes))

    prepare(compiler="inductor", codegen={"passes": {"count": count}})
    assert seen


def test_nothing_is_captured_under_traffic(prepare):
    """vLLM: no compilation or capture after warm-up; here `seal`."""
    prepared = prepare()
    prepared.capture(None)
    prepared.seal()
    with pytest.raises(CaptureAfterSeal):
        prepared.capture(None)
    assert mode_of(prepared, 3, True) == "FULL 4"


def test_torch_compile_takes_it_as_a_backend():
    """torch: backends by name."""
    fast = torch.compile(Model(), backend="piecegraph", options={"compiler": "eager"})
    x = torch.rand(3, 8)
    torch.testing.assert_close(fast(x), Model()(x))
