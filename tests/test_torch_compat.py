"""Each private name of torch that we use is there and does what we rely on."""

from __future__ import annotations

import dataclasses
import operator
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._ordered_set import OrderedSet

from piecegraph.torch_compat import (
    inductor,
    inductor_fixes,
    ops,
    partition,
    patch,
    settings,
    symbolic,
    tensors,
    toolchain,
)


def test_without_modes_hides_calls_from_a_mode() -> None:
    seen: list[Any] = []

    class Spy(tensors.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    with Spy():
        with tensors.without_modes():
            torch.ones(2)
        assert not seen
        torch.ones(2)
    assert seen


def test_storages_are_told_apart_also_when_freed() -> None:
    tensor = torch.rand(3)
    assert tensors.storage_id(tensor[1:]) == tensors.storage_id(tensor)
    taken = tensors.storage_id(tensor)
    weak = tensors.weak_storage(tensor)
    del tensor
    others = [torch.rand(3) for _ in range(1000)]
    assert weak.expired()
    assert taken not in {tensors.storage_id(other) for other in others}


def test_composite_operators_are_known() -> None:
    assert ops.is_composite(torch.ops.aten.reshape.default)
    assert not ops.is_composite(torch.ops.aten.add.Tensor)


def test_an_unowned_alias_of_nothing_is_nothing() -> None:
    assert tensors.unowned_alias(torch.rand(0, 3)).shape == (0, 3)


def test_names_for_a_device_exist_without_one() -> None:
    for name in ("_host_emptyCache", "_cuda_endAllocateToPool", "_cuda_releasePool"):
        assert hasattr(torch._C, name) or not torch.cuda.is_available()
    for name in ("capture_begin", "capture_end", "instantiate", "raw_cuda_graph", "replay"):
        assert hasattr(torch.cuda.CUDAGraph, name)


def test_faking_is_noticed() -> None:
    assert not tensors.is_faking()
    with tensors.fresh_fake_mode():
        assert tensors.is_faking()
    assert not tensors.is_faking()


def test_gradients_are_turned_off_and_on() -> None:
    tensors.set_grad_enabled(False)
    assert not tensors.is_grad_enabled()
    tensors.set_grad_enabled(True)
    assert tensors.is_grad_enabled()


def test_fake_implementations_are_found_however_they_were_registered() -> None:
    library: Any = torch.library.Library("piecegraph_compat", "DEF")  # type: ignore[no-untyped-call]
    library.define("f(Tensor x) -> Tensor")

    def fake(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert ops.fake_function("piecegraph_compat::f") is None
    torch.library.register_fake("piecegraph_compat::f", fake, lib=library)
    assert ops.fake_function("piecegraph_compat::f") is fake
    made = torch.library.custom_op("piecegraph_compat::g", fake, mutates_args=())
    made.register_fake(fake)
    assert ops.fake_function("piecegraph_compat::g") is fake
    library._destroy()


def test_changed_settings_are_those_that_shape_code() -> None:
    import torch._dynamo.config as dynamo_config
    import torch._inductor.config as inductor_config

    before = settings.changed_settings()
    with (
        inductor_config.patch({"cpp.simdlen": 8, "trace.enabled": True, "compile_threads": 3}),
        dynamo_config.patch(verbose=True),
    ):
        changed = settings.changed_settings()
    assert {k: v for k, v in changed.items() if before.get(k) != v} == {
        "torch._inductor.config.cpp.simdlen": 8
    }


NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def directories() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize("before", [None, "/before"])
def test_w29_cache_directories_are_put_back_also_after_an_error(
    before: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        if before is not None:
            monkeypatch.setenv(name, before)

    def fail_inside() -> None:
        from torch._inductor.runtime.cache_dir_utils import cache_dir, triton_cache_dir

        with inductor.inductor_cache_directory(str(tmp_path)):
            assert cache_dir() == str(tmp_path)
            assert triton_cache_dir(0).startswith(str(tmp_path))
            os.environ["TRITON_CACHE_DIR"] = "/set by torch"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert directories() == [before, before]


def test_w29_threads_of_ours_never_see_each_others_directory(tmp_path: Path) -> None:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    seen: list[bool] = []

    def use(number: int) -> None:
        path = str(tmp_path / str(number))
        for _ in range(20):
            with inductor.inductor_cache_directory(path):
                seen.append(cache_dir() == path)
            with patch.cache_variables_kept():
                seen.append(os.environ.get(NAMES[0]) == before)

    before = os.environ.get(NAMES[0])
    threads = [threading.Thread(target=use, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 160
    assert all(seen)
    assert os.environ.get(NAMES[0]) == before


def test_nobody_compiles_beside_us() -> None:
    """torch.compile in another thread holds Dynamo's lock, and its compilers keep global state."""
    from torch._dynamo.convert_frame import compile_lock

    inside = threading.Event()

    def enter() -> None:
        with patch.cache_variables_kept():
            inside.set()

    thread = threading.Thread(target=enter)
    with compile_lock:
        thread.start()
        assert not inside.wait(0.2)
    assert inside.wait(10)
    thread.join()


@pytest.mark.parametrize("code", ["int probe;", "not C++"])
def test_the_compiler_is_probed_once_a_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    from torch._inductor.cpp_builder import CppBuilder
    from torch._inductor.cpu_vec_isa import VecAVX512, VecISA

    original = VecISA.check_build

    def probe(scratch: str) -> bool:
        with inductor.inductor_cache_directory(str(tmp_path / scratch)):
            with inductor.inductor_options():
                return VecAVX512().check_build(code)

    monkeypatch.setattr(toolchain, "_probes", lambda: tmp_path / "probes")
    builds = code == "int probe;"
    assert probe("first") is builds
    monkeypatch.setattr(CppBuilder, "build", lambda self: pytest.fail("built again"))
    assert probe("second") is builds
    assert VecISA.check_build is original


def test_order_of_reads_and_mutations_is_put_right_while_it_lasts() -> None:
    from torch._inductor import ir
    from torch._inductor.graph import GraphLowering

    before = vars(ir.FallbackKernel)["create"]
    assert isinstance(before, classmethod)
    assert callable(GraphLowering.mark_buffer_mutated)
    with inductor_fixes.reads_before_mutations():
        assert vars(ir.FallbackKernel)["create"] is not before
    assert vars(ir.FallbackKernel)["create"] is before


def test_conditions_that_hold_for_all_sizes_are_told_without_a_guard() -> None:
    env = tensors.fresh_fake_mode().shape_env
    rows = env.create_unbacked_symint()
    torch._check(rows >= 0)
    assert symbolic.surely(rows * 2 <= rows * 3)
    assert not symbolic.surely(rows <= 4)
    assert symbolic.surely(True)
    assert not env.guards


@pytest.mark.parametrize("inference", [False, True])
def test_writes_that_making_a_fake_tensor_counts_are_known(inference: bool) -> None:
    with torch.inference_mode(inference):
        whole = torch.zeros(8, 4)
        whole.add_(1)
        counted = [
            tensors.writes_of_faking(tensor, tensors.fresh_fake_mode())
            for tensor in (whole, whole[2:])
        ]
    assert counted == [0, 1]


def test_only_a_triton_kernel_tells_what_it_writes_to() -> None:
    node = torch.fx.Graph().call_function(torch.cond, (True, torch.sin, torch.cos, ()))
    assert ops.triton_writes(node, {}) is None


@pytest.mark.compile
def test_inductor_partitions_a_graph_of_the_cpu_and_all_is_put_back() -> None:
    from torch._inductor import compile_fx, scheduler, utils

    def state() -> list[Any]:
        wrapper = utils._unstable_customized_partition_wrapper
        cuts = scheduler.Scheduler
        signs, passes = cuts.get_graph_partition_signature, compile_fx._recursive_post_grad_passes
        is_gpu = scheduler.BaseSchedulerNode.is_gpu
        return [cuts.should_partition, signs, passes, is_gpu, wrapper.wrapper]

    before = state()
    wrapped: list[Any] = []

    def wrap(partition: Any) -> Any:
        wrapped.append(partition)
        return partition

    def partitions(graph: torch.fx.GraphModule, ops: list[str]) -> partition.Partitions:
        x = tensors.fresh_fake_mode().from_tensor(torch.zeros(4))
        options = {"custom_should_partition_ops": ops, "force_disable_caches": True}
        with (
            inductor.inductor_options(),
            partition.inductor_partitions(wrap) as made,
        ):
            inductor.inductor_compile(graph, [x], options)[1]()
        return made

    library: Any = torch.library.Library("piecegraph_cut", "DEF")  # type: ignore[no-untyped-call]
    library.define("here(Tensor x) -> Tensor")
    library.impl("here", torch.clone, "CPU")
    torch.library.register_fake("piecegraph_cut::here", torch.empty_like, lib=library)
    try:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        x = graph.call_function(torch.sin, (x,))
        x = graph.call_function(torch.ops.piecegraph_cut.here.default, (x,))
        graph.output((graph.call_function(torch.cos, (x,)),))
        made = partitions(torch.fx.GraphModule({}, graph), ["piecegraph_cut::here"])
        assert (made.count, made.cut_at, made.left_out) == (2, {"piecegraph_cut::here"}, {})
        assert made.alive == {"aten::sin", "piecegraph_cut::here", "aten::cos"}
        assert len(wrapped) == 2
        assert partitions(torch.fx.GraphModule({}, graph), []).count == 1
    finally:
        library._destroy()
    assert state() == before


@pytest.mark.compile
def test_partitions_that_write_parts_of_one_tensor_share_its_memory() -> None:
    """It is made by the first, handed on to each, freed by the last unless that returns it."""
    from types import SimpleNamespace

    from torch._inductor import ir, scheduler

    assert {"symbol_inputs", "input_nodes", "output_nodes", "input_deallocation"} <= {
        field.name for field in dataclasses.fields(ir.GraphPartitionSignature)
    }
    assert callable(scheduler.get_layout_symints)
    cpu = torch.device("cpu")

    def buffer(name: str, layout: Any) -> Any:
        return ir.Buffer(name=name, layout=layout)

    def node(*buffers: Any) -> Any:
        outputs = [SimpleNamespace(node=each) for each in buffers]
        return SimpleNamespace(get_outputs=lambda: outputs)

    def signature() -> Any:
        return ir.GraphPartitionSignature(OrderedSet(), {}, [], {}, False, [])

    whole = buffer("whole", ir.FixedLayout(cpu, torch.float32, [4, 8], [8, 1]))
    view = ir.ReinterpretView(data=ir.StorageBox(whole), layout=whole.layout)
    parts = [buffer(f"part{at}", ir.NonOwningLayout(view)) for at in range(2)]
    other = buffer("other", whole.layout)
    partitions = [[node(parts[0])], [node(other)], [node(parts[1])], [node(whole)]]
    for kept in (False, True):
        signed = [signature() for _ in partitions]
        signed[3].output_nodes.extend([whole] if kept else [])
        inductor_fixes.share_memory_of_parts(partitions, signed)
        assert [len(each.output_nodes) for each in signed] == [1, 0, 1, int(kept)]
        freed = [each.input_deallocation for each in signed]
        assert freed == [{}, {}, {"whole": False}, {"whole": not kept}]
        assert [list(each.input_nodes) for each in signed] == [[], [], ["whole"], ["whole"]]
    alone = [signature()]
    inductor_fixes.share_memory_of_parts([[node(*parts), node(whole)]], alone)
    assert alone == [signature()]


def test_a_mutation_is_found_through_views() -> None:
    aten = torch.ops.aten

    def graph(mutate: bool, *views: Any) -> torch.fx.Node:
        made = torch.fx.Graph()
        x = made.placeholder("x")
        last = x
        for view, *rest in views:
            last = made.call_function(view, (last, *rest))
        op = aten.add_.Tensor if mutate else aten.add.Tensor
        made.output((x, made.call_function(op, (last, x))))
        return x

    through = [(), ((aten.slice.Tensor, 0, 0, 1),), ((aten.split.Tensor, 2), (operator.getitem, 0))]
    assert all(inductor_fixes.is_mutated(graph(True, *views)) for views in through)
    assert not any(inductor_fixes.is_mutated(graph(False, *views)) for views in through)
    assert not inductor_fixes.is_mutated(graph(True, (aten.sin.default,)))
    assert inductor_fixes.is_mutated(graph(False, (torch.ops.higher_order.cond,)))


@pytest.mark.compile
def test_parts_of_a_mutated_cat_stay_as_they_were() -> None:
    import torch._inductor.config as inductor_config

    def body(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        part = x @ x
        whole = torch.cat([part, x], 1)
        whole[torch.tensor([0, 1])] = 7.0
        return whole * 2, part.sin() + 1

    x = torch.randn(4, 4)
    with (
        torch.no_grad(),
        inductor_config.patch(force_disable_caches=True),
        inductor_fixes.reads_before_mutations(),
    ):
        torch.testing.assert_close(torch.compile(body)(x), body(x))


@pytest.mark.compile
def test_ops_that_inductor_takes_to_pieces_are_known() -> None:
    aten = torch.ops.aten
    known = [ops.is_decomposed(op) for op in (aten.silu.default, aten.linear.default)]
    assert known == [True, True]
    assert not ops.is_decomposed(aten.sin.default)


def test_what_partitions_a_graph_is_put_back_after_an_error() -> None:
    import torch._inductor.config as inductor_config
    from torch._inductor import scheduler, utils

    def state() -> list[Any]:
        wrapper = utils._unstable_customized_partition_wrapper
        judge = scheduler.Scheduler.should_partition
        return [wrapper.wrapper, judge, inductor_config.graph_partition]

    inside: list[Any] = []

    def fail_inside() -> None:
        with partition.inductor_partitions(lambda partition: partition):
            inside.extend(state())
            raise ZeroDivisionError

    with inductor_config.patch(graph_partition=False):
        before = state()
        with pytest.raises(ZeroDivisionError):
            fail_inside()
        assert not any(one == other for one, other in zip(before, inside, strict=True))
        assert state() == before


def test_a_compiled_graph_tells_its_partitions_to_the_wrapper() -> None:
    from torch._inductor.utils import CUDAGraphWrapperMetadata

    assert CUDAGraphWrapperMetadata(num_partitions=3, partition_index=0).num_partitions == 3
