"""Each repair gives right results where stock torch gives wrong ones."""

import operator
from contextlib import nullcontext

import pytest
import torch

from piecegraph.compile.backends.inductor import compiling
from piecegraph.torch_compat.basics import tensors
from piecegraph.torch_compat.repairs import inductor_fixes


def test_a_mutation_is_found_through_views():
    aten = torch.ops.aten

    def graph(mutate, *views):
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
def ops():
    """`accumulate` adds to its first argument in place; `fresh` copies."""
    library = torch.library.Library("piecegraph_fixes", "DEF")
    library.define("accumulate(Tensor(a!) x, Tensor y) -> ()")
    library.define("fresh(Tensor x) -> Tensor")
    library.impl("accumulate", _accumulate, "CPU")
    library.impl("fresh", torch.clone, "CPU")
    torch.library.register_fake("piecegraph_fixes::accumulate", _nothing, lib=library)
    torch.library.register_fake("piecegraph_fixes::fresh", torch.empty_like, lib=library)
    yield torch.ops.piecegraph_fixes
    library._destroy()


def _accumulate(x, y):
    x.add_(y)


def _nothing(x, y):
    return None


def compiled_right(body, repair):
    """Whether Inductor's code for `body` gives what `body` gives."""
    import torch._inductor.config as inductor_config

    torch._dynamo.reset()
    x = torch.randn(8, 8) / 4
    uncached = inductor_config.patch(force_disable_caches=True)
    with torch.no_grad(), compiling(), uncached, repair:
        got = torch.compile(body)(x.clone())
    expected = body(x.clone())
    return all(map(torch.allclose, tensors.tree_leaves(got), tensors.tree_leaves(expected)))


REPAIRED = pytest.mark.parametrize("repaired", [True, pytest.param(False, marks=pytest.mark.heavy)])
"""With the repair, and without it: that upstream needs it still."""


@pytest.mark.compile
@pytest.mark.heavy  # what is compiled is: test_value_computed_before_a_mutation_is_of_the_old_value
@pytest.mark.parametrize("repaired", [True, False])
def test_reads_before_mutations(ops, repaired):
    def body(x):
        h = x @ x.T
        b = h * 1.5
        ops.accumulate(h, b + 1)
        return h + b

    repair = inductor_fixes.reads_before_mutations() if repaired else nullcontext()
    assert compiled_right(body, repair) is repaired, "upstream is right: remove the repair"


@pytest.mark.compile
@REPAIRED
def test_unshared_cat_parts(repaired):
    def body(x):
        part = x @ x
        whole = torch.cat([part, x], 1)
        whole[torch.tensor([0, 1])] = 7.0
        return whole * 2, part.sin() + 1

    repair = inductor_fixes.unshared_cat_parts() if repaired else nullcontext()
    assert compiled_right(body, repair) is repaired, "upstream is right: remove the repair"


def test_lowering_is_repaired_only_inside():
    from torch._inductor import ir

    def state():
        return [vars(ir.FallbackKernel)["create"], vars(ir.ConcatKernel)["create"]]

    before = state()
    with inductor_fixes.repaired_lowering():
        assert not any(one is other for one, other in zip(state(), before, strict=True))
    assert all(one is other for one, other in zip(state(), before, strict=True))


def test_every_repair_is_part_of_the_key():
    for name in ("reads_before_mutations", "unshared_cat_parts"):
        assert getattr(inductor_fixes, name) in inductor_fixes.REPAIRS


def test_losers_of_autotuning_without_a_cubin_are_dropped_when_kernels_are_loaded(monkeypatch):
    from types import SimpleNamespace

    from torch._inductor import codecache, triton_bundler

    class Result:
        def __init__(self, name):
            self.name = name

        def reload_cubin_path(self):
            if self.name == "lost":
                raise RuntimeError("no cubin")

    def kernels(*names):
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


@pytest.mark.compile
def test_slices_of_any_size():
    """A lowering that is active only inside; `test_slices_of_any_size_are_lowered` compiles."""
    from torch._inductor import lowering

    op = torch.ops.aten.slice.Tensor
    before = lowering.lowerings[op]
    with inductor_fixes.slices_of_any_size():
        assert (lowering.lowerings[op] is not before) == (torch.__version__ < "2.12")
    assert lowering.lowerings[op] is before
