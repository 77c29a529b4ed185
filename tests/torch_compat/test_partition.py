"""Partitions of generated code, each replaced by a callable of ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import tensors
from piecegraph.torch_compat.compiling import inductor, partition

TOOLCHAIN = toolchain_directory("")


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
            inductor.inductor_options(TOOLCHAIN),
            partition.inductor_partitions(wrap) as made,
        ):
            inductor.inductor_compile(graph, [x], options)
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
