"""Code that is cut at an op; everything replaced in torch is put back."""

import pytest
import torch

from piecegraph.compile.backends.inductor import toolchain_directory
from piecegraph.torch_compat.basics import tensors
from piecegraph.torch_compat.compiling import inductor, partition


@pytest.mark.compile
def test_code_is_cut_at_an_op_and_torch_is_put_back():
    from torch._inductor import output_code, scheduler

    def state():
        return [scheduler.Scheduler.graph_partition, output_code.CompiledFxGraph.__call__]

    before, calls = state(), list[str]()
    library = torch.library.Library("piecegraph_cut", "DEF")
    library.define("here(Tensor x) -> Tensor")
    library.impl("here", torch.clone, "CPU")
    torch.library.register_fake("piecegraph_cut::here", torch.empty_like, lib=library)

    def run(original, code, args):
        calls.append("code")
        return original(code, args)

    def hook(code):
        return lambda args: calls.append("partition") or code(args)

    try:
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        squared = graph.call_function(torch.mm, (x, x))
        same = graph.call_function(torch.ops.piecegraph_cut.here.default, (squared,))
        graph.output((graph.call_function(torch.mm, (same, x)),))
        module, real = torch.fx.GraphModule({}, graph), torch.randn(4, 4)
        options = {
            **partition.partition_options(["piecegraph_cut::here"]),
            "force_disable_caches": True,
        }
        with partition.partitioned(module, options):
            assert state()[0] != before[0]
        fake = tensors.fresh_fake_mode().from_tensor(real)
        with inductor.inductor_options(toolchain_directory("")):
            artifact, _ = inductor.inductor_compile(module, [fake], options)
        code = inductor.inductor_callable(artifact)
        with partition.code_run_by(run), partition.partitions_through(hook):
            (got,) = code([real])
        torch.testing.assert_close(got, real @ real @ real)
        assert calls == ["code", "partition", "partition"]
    finally:
        library._destroy()
    assert state() == before
    assert partition.partition_options([]) == {}
