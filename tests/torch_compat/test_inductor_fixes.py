"""Each repair gives right results where stock torch gives wrong ones."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._ordered_set import OrderedSet

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import tensors
from piecegraph.torch_compat.compiling import inductor, partition
from piecegraph.torch_compat.repairs import inductor_fixes

TOOLCHAIN = toolchain_directory("")


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


@pytest.fixture
def ops() -> Iterator[Any]:
    """`accumulate` adds to its first argument in place; `fresh` copies."""
    library: Any = torch.library.Library("piecegraph_fixes", "DEF")  # type: ignore[no-untyped-call]
    library.define("accumulate(Tensor(a!) x, Tensor y) -> ()")
    library.define("fresh(Tensor x) -> Tensor")
    library.impl("accumulate", _accumulate, "CPU")
    library.impl("fresh", torch.clone, "CPU")
    torch.library.register_fake("piecegraph_fixes::accumulate", _nothing, lib=library)
    torch.library.register_fake("piecegraph_fixes::fresh", torch.empty_like, lib=library)
    yield torch.ops.piecegraph_fixes
    library._destroy()


def _accumulate(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def _nothing(x: Tensor, y: Tensor) -> None:
    return None


def compiled_right(body: Callable[[Tensor], Any], repair: AbstractContextManager[None]) -> bool:
    """Whether Inductor's code for `body` gives what `body` gives."""
    import torch._inductor.config as inductor_config

    torch._dynamo.reset()
    x = torch.randn(8, 8) / 4
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True), repair:
        got = torch.compile(body)(x.clone())
    expected = body(x.clone())
    return all(map(torch.allclose, tensors.tree_leaves(got), tensors.tree_leaves(expected)))


REPAIRED = pytest.mark.parametrize("repaired", [True, pytest.param(False, marks=pytest.mark.heavy)])
"""With the repair, and without it: that upstream needs it still."""


@pytest.mark.compile
@REPAIRED
def test_reads_before_mutations(ops: Any, repaired: bool) -> None:
    def body(x: Tensor) -> Tensor:
        h = x @ x.T
        b = h * 1.5
        ops.accumulate(h, b + 1)
        return h + b

    repair = inductor_fixes.reads_before_mutations() if repaired else nullcontext()
    assert compiled_right(body, repair) is repaired, "upstream is right: remove the repair"


@pytest.mark.compile
@REPAIRED
def test_unshared_cat_parts(repaired: bool) -> None:
    def body(x: Tensor) -> tuple[Tensor, Tensor]:
        part = x @ x
        whole = torch.cat([part, x], 1)
        whole[torch.tensor([0, 1])] = 7.0
        return whole * 2, part.sin() + 1

    repair = inductor_fixes.unshared_cat_parts() if repaired else nullcontext()
    assert compiled_right(body, repair) is repaired, "upstream is right: remove the repair"


@pytest.mark.compile
@REPAIRED
def test_share_memory_of_parts(ops: Any, monkeypatch: pytest.MonkeyPatch, repaired: bool) -> None:
    def compiled() -> bool:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        first = graph.call_function(torch.ops.aten._softmax.default, (x, 1, False))
        cut = graph.call_function(ops.fresh.default, (first,))
        second = graph.call_function(torch.ops.aten._softmax.default, (cut, 1, False))
        graph.output((graph.call_function(torch.cat, ([first, second], 1)),))
        options = {
            "custom_should_partition_ops": ["piecegraph_fixes::fresh"],
            "force_disable_caches": True,
        }
        module, real = torch.fx.GraphModule({}, graph), torch.randn(4, 8)
        with inductor.inductor_options(TOOLCHAIN), partition.inductor_partitions(lambda made: made):
            fake = tensors.fresh_fake_mode().from_tensor(real)
            artifact, _ = inductor.inductor_compile(module, [fake], options)
        (got,) = inductor.inductor_callable(artifact)([real])
        return torch.allclose(got, module(real)[0])

    if not repaired:
        monkeypatch.setattr(partition, "share_memory_of_parts", lambda *given: None)
    assert compiled() is repaired, "upstream is right: remove the repair"


def test_lowering_is_repaired_only_inside() -> None:
    from torch._inductor import ir

    def state() -> list[Any]:
        return [vars(ir.FallbackKernel)["create"], vars(ir.ConcatKernel)["create"]]

    before = state()
    with inductor_fixes.repaired_lowering():
        assert not any(one is other for one, other in zip(state(), before, strict=True))
    assert all(one is other for one, other in zip(state(), before, strict=True))


def test_every_repair_is_part_of_the_key() -> None:
    for name in ("reads_before_mutations", "unshared_cat_parts", "share_memory_of_parts"):
        assert getattr(inductor_fixes, name) in inductor_fixes.REPAIRS


def test_losers_of_autotuning_without_a_cubin_are_dropped_when_kernels_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from torch._inductor import codecache, triton_bundler

    class Result:
        def __init__(self, name: str) -> None:
            self.name = name

        def reload_cubin_path(self) -> None:
            if self.name == "lost":
                raise RuntimeError("no cubin")

    def kernels(*names: str) -> list[Any]:
        kernel = SimpleNamespace(compile_results=[Result(name) for name in names])
        return [SimpleNamespace(kernel=kernel, kernel_name="k", cache_key="key")]

    monkeypatch.setattr(codecache, "StaticAutotunerFuture", lambda kernel: kernel)
    load = triton_bundler.TritonBundler.load_autotuners
    assert load(kernels("lost", "won")) == []  # what stock torch does
    with inductor_fixes.without_lost_cubins():
        loaded = kernels("lost", "won")
        assert triton_bundler.TritonBundler.load_autotuners(loaded) == ["k"]
        assert [result.name for result in loaded[0].kernel.compile_results] == ["won"]
        assert triton_bundler.TritonBundler.load_autotuners(kernels("lost")) == []
        assert triton_bundler.TritonBundler.load_autotuners(None) == []
    assert triton_bundler.TritonBundler.load_autotuners == load
