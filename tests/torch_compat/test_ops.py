"""Operators: names, overloads, schemas, writes, implementations."""

from __future__ import annotations

import copy
import cProfile
import functools
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.torch_compat.basics import ops
from piecegraph.torch_compat.basics.ops import (
    CALL_OP,
    branches_by_value,
    is_higher_order,
    ops_through,
    run_higher_order,
)

aten = torch.ops.aten


def test_composite_operators_are_known():
    assert ops.is_composite(torch.ops.aten.reshape.default)
    assert not ops.is_composite(torch.ops.aten.add.Tensor)


def test_ops_with_a_kernel_of_their_own_for_the_cpu_are_known(library):
    library.define("own(Tensor x) -> Tensor")
    library.impl("own", lambda x: x + 1, "CPU")
    namespace = getattr(torch.ops, library.ns)
    assert ops.is_python_op(namespace.own.default)
    assert ops.is_in_python(namespace.own.default)
    assert not ops.is_in_python(torch.ops.aten.add.Tensor)
    assert not ops.is_python_op(torch.ops.aten.reshape.default)


def test_collectives_are_known():
    assert ops.is_collective(torch.ops.c10d.allreduce_.default)
    assert ops.is_collective(torch.ops._c10d_functional.all_reduce.default)
    assert not ops.is_collective(torch.ops._c10d_functional.wait_tensor.default)
    assert not ops.is_collective(torch.ops.aten.add.Tensor)
    assert not ops.is_collective(torch.ops.higher_order.cond)
    assert ops.is_distributed(torch.ops._c10d_functional.wait_tensor.default)
    assert not ops.is_distributed(torch.ops.aten.add.Tensor)


def test_results_that_alias_arguments_are_known():
    assert ops.returns_new_memory(torch.ops.aten.add.Tensor)
    assert not ops.returns_new_memory(torch.ops.aten.view.default)


def test_fake_implementations_are_found_however_they_were_registered():
    library = torch.library.Library("piecegraph_compat", "DEF")
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


def test_only_a_triton_kernel_tells_what_it_writes_to():
    node = torch.fx.Graph().call_function(torch.cond, (True, torch.sin, torch.cos, ()))
    assert ops.triton_writes(node, {}) is None


@pytest.fixture
def library():
    """Ops of one test: `write` has one overload, `two` has two."""
    made = torch.library.Library("piecegraph_ops", "DEF")
    made.define("write(Tensor x, Tensor(a!) out, *, Tensor(b!)? more=None) -> ()")
    made.define("two(Tensor x) -> Tensor")
    made.define("two.scaled(Tensor x, float by) -> Tensor")
    yield made
    made._destroy()


def test_names_of_an_operator_and_of_its_overloads(library):
    packet = torch.ops.piecegraph_ops.two
    assert ops.is_op(packet)
    assert ops.is_op(packet.scaled)
    assert not ops.is_op(torch.add)
    assert ops.op_name(packet) == ops.op_name(packet.scaled) == "piecegraph_ops::two"
    assert ops.overload_name(packet.default) == "piecegraph_ops::two.default"
    assert ops.overload_name(packet.scaled) == "piecegraph_ops::two.scaled"
    assert {ops.overload_name(each) for each in ops.overloads(packet.scaled)} == {
        "piecegraph_ops::two.default",
        "piecegraph_ops::two.scaled",
    }


def test_overload_that_a_call_runs(library):
    two, write = torch.ops.piecegraph_ops.two, torch.ops.piecegraph_ops.write
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["example_value"], mask.meta["example_value"] = torch.ones(2), torch.ones(2) > 0
    calls = [
        (two, (x,), {}, two.default),
        (two, (x,), {"by": 3.0}, two.scaled),
        (two.scaled, (x, 3.0), {}, two.scaled),
        (write, (x, x), {}, write.default),
        (aten.pow, (x, 2), {}, aten.pow.Tensor_Scalar),
        (aten.pow, (2, x), {}, aten.pow.Scalar),
        (aten.index, (x, [mask]), {}, aten.index.Tensor),
        (aten.to, (x, torch.float16), {}, aten.to.dtype),
    ]
    for op, args, kwargs, expected in calls:
        assert ops.overload_of(graph.call_function(op, args, kwargs)) is expected


def test_an_assertion_returns_nothing():
    assert ops.returns_nothing(aten._assert_async.default)
    assert not ops.returns_nothing(aten.add.Tensor)


def test_schemas_are_of_all_overloads(library):
    found = ops.schemas(torch.ops.piecegraph_ops.two)
    assert len(found) == 2
    assert any("float by" in schema for schema in found)


def test_writes_are_read_from_the_schema(library):
    write = torch.ops.piecegraph_ops.write.default
    assert ops.is_mutable(write)
    assert not ops.is_mutable(torch.ops.piecegraph_ops.two.default)
    assert ops.mutated_arguments(write, ("x", "out"), {}) == ["out"]
    assert ops.mutated_arguments(write, ("x",), {"out": 1, "more": 2}) == [1, 2]
    assert list(ops.given_arguments(write, ("x", "out"), {})) == [("x", False), ("out", True)]


@pytest.mark.parametrize("training", [True, False])
def test_a_write_that_a_schema_hides_is_known(training):
    norm = torch.ops.aten.native_batch_norm.default
    given = ("x", "weight", "bias", "mean", "var", training, 0.1, 1e-5)
    assert ops.is_mutable(norm)
    assert ops.mutated_arguments(norm, given, {}) == (["mean", "var"] if training else [])
    assert ops.hides_writes("batch_norm")
    assert not ops.hides_writes("linear")
    assert not ops.hides_writes("no op of torch")


def test_function_of_a_custom_op_is_found():
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert ops.custom_op_function("piecegraph_compat::double") is None
    torch.library.custom_op("piecegraph_compat::double", double, mutates_args=())
    assert ops.custom_op_function("piecegraph_compat::double") is double


def test_only_a_kernel_in_python_for_every_device_is_one_that_a_compiler_could_see():
    def place(function):
        return f"{__file__}:{function.__code__.co_firstlineno}"

    def plus(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    name = "piecegraph_compat"
    torch.library.custom_op(f"{name}::every", plus, mutates_args=())
    torch.library.custom_op(f"{name}::cpu", plus, mutates_args=(), device_types="cpu")
    library = torch.library.Library(name, "FRAGMENT")
    library.define("impl(Tensor x) -> Tensor")
    library.impl("impl", plus, "CompositeExplicitAutograd")
    found = {op: ops.python_for_all_devices(getattr(torch.ops.piecegraph_compat, op).default)
             for op in ("every", "cpu", "impl")}  # fmt: skip
    assert (found["every"], found["cpu"]) == (place(plus), None)
    assert found["impl"].startswith(f"{__file__}:")
    assert ops.python_for_all_devices(torch.ops.aten.add.Tensor) is None


class Scaled:
    def __init__(self, factor):
        self.factor, self.calls = factor, 0

    def scale(self, x: torch.Tensor, n: int, *, s: str) -> torch.Tensor:
        self.calls += 1
        return x * self.factor


def test_the_function_that_an_op_calls_is_found_and_does_not_run(library):
    library.define("scaled(Tensor x, int n=1, *, str s) -> Tensor")
    scaled = Scaled(2.0)
    library.impl("scaled", scaled.scale, "CompositeImplicitAutograd")
    op = torch.ops.piecegraph_ops.scaled.default
    assert ops.traced_kernels(op) == ["CompositeImplicitAutograd"]
    found = ops.registered_function(op, "CompositeImplicitAutograd")
    assert found is not None
    function, bound = found
    assert function.__code__ is Scaled.scale.__code__
    assert bound == {"self": scaled}
    assert scaled.calls == 0


def test_a_profiler_sees_no_end_of_itself(library):
    """cProfile's cannot be set again from Python: each call after that would raise."""
    library.define("profiled(Tensor x) -> Tensor")
    library.impl("profiled", doubled, "CompositeImplicitAutograd")
    with cProfile.Profile() as profile:
        op = torch.ops.piecegraph_ops.profiled.default
        function, _ = ops.registered_function(op, "CompositeImplicitAutograd")
        copy.copy(function)
    assert function.__code__ is doubled.__code__
    profile.create_stats()
    assert any(name == "copy" for _, _, name in profile.stats)


def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_a_collection_meanwhile_is_not_taken_for_the_function(library):
    library.define("collected(Tensor x) -> Tensor")
    library.impl("collected", doubled, "CompositeImplicitAutograd")
    thresholds, ended = gc.get_threshold(), []

    def collecting(phase, info):
        ended.append(phase)

    gc.callbacks.append(collecting)
    gc.set_threshold(1)
    try:
        op = torch.ops.piecegraph_ops.collected.default
        function, _ = ops.registered_function(op, "CompositeImplicitAutograd")
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(collecting)
    assert function.__code__ is doubled.__code__
    assert ended
    assert gc.isenabled()


def test_kernels_of_a_device_run_when_the_model_does_and_are_not_traced(library):
    library.impl("two", torch.clone, "CPU")
    assert ops.traced_kernels(torch.ops.piecegraph_ops.two.default) == []
    assert ops.traced_kernels(aten.linear.default) == []


def test_a_kernel_that_is_no_python_function_is_not_found(library):
    library.define("native(Tensor x) -> Tensor")
    library.impl("native", torch.relu, "CompositeImplicitAutograd")
    native = torch.ops.piecegraph_ops.native.default
    assert ops.registered_function(native, "CompositeImplicitAutograd") is None


def test_an_op_of_torch_that_was_overridden_is_named():
    assert ops.overridden_ops() == []
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("linear", lambda x, w, b=None: x @ w.t(), "CompositeImplicitAutograd")
        assert ops.overridden_ops() == [(aten.linear.default, "CompositeImplicitAutograd")]
    finally:
        library._destroy()
    assert ops.overridden_ops() == []


def wrapping(function):
    @functools.wraps(function)
    def call(x: torch.Tensor) -> Any:
        return function(x)

    return call


def test_rules_of_a_program_to_compile_ops_are_named():
    from torch._inductor import decomposition, lowering

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert ops.registered_rules() == {}
    with (
        mock.patch.dict(decomposition.decompositions, {aten.silu.default: double}),
        mock.patch.dict(lowering.lowerings, {aten.sin.default: wrapping(double)}),
    ):
        assert ops.registered_rules() == {
            "torch._inductor.decomposition[aten.silu.default]": double,
            "torch._inductor.lowering[aten.sin.default]": double,
        }


def test_only_a_launch_is_a_triton_call():
    node = torch.fx.Graph().call_function(aten.add.Tensor, (1, 2))
    assert ops.triton_call(node) is None


def test_kernel_of_a_device_runs_past_the_mode():
    x = torch.ones(2)
    assert torch.equal(ops.run_kernel(aten.add.Tensor, "CPU", (x, x), {}), x + x)


def test_without_frame_is_the_same_operator():
    x = torch.ones(2)
    assert torch.equal(ops.without_frame(aten.add.Tensor)(x, x), x + x)
    assert ops.without_frame(len) is len


def test_a_mode_sees_the_ops_inside_a_kernel_that_is_called(library):
    library.define("twice(Tensor x, Tensor(a!) out) -> ()")
    library.impl("twice", lambda x, out: out.copy_(x * 2) and None, "CPU")
    op = getattr(torch.ops, library.ns).twice.default
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(ops.op_name(func))
            return func(*args, **(kwargs or {}))

    x, out = torch.ones(1), torch.zeros(1)
    with Seen():
        ops.call_kernel(op, (x,), {"out": out})
    assert out.item() == 2
    assert {"aten::mul", "aten::copy_"} <= {*seen}
    assert not any("twice" in name for name in seen)


def test_an_operator_is_called_through_another_function():
    calls = []

    def noted(x, y):
        calls.append((x, y))
        return CALL_OP(torch.ops.aten.add.Tensor, x, y) * 10

    one = torch.ones(2)
    with ops_through({torch.ops.aten.add.Tensor: noted}):
        assert torch.ops.aten.add.Tensor(one, one).tolist() == [20.0, 20.0]
        assert torch.ops.aten.mul.Tensor(one, one).tolist() == [1.0, 1.0]
    assert torch.ops.aten.add.Tensor(one, one).tolist() == [2.0, 2.0]
    assert len(calls) == 1


def test_operators_of_higher_order_run_by_their_kernel():
    cond = torch.ops.higher_order.cond
    assert is_higher_order(cond)
    assert branches_by_value(cond, (torch.tensor(True),))
    assert not branches_by_value(cond, (True,))
    assert not is_higher_order(torch.ops.aten.add)
    scan = torch.ops.higher_order.invoke_subgraph
    assert not branches_by_value(scan, ())
    key = torch._C.DispatchKey.CompositeExplicitAutograd
    op = mock.Mock(py_kernels={key: lambda *args, **kwargs: (args, kwargs)})
    assert run_higher_order(op, (1, 2), {"x": 3}) == ((1, 2), {"x": 3})


def test_arguments_that_are_sizes_are_told_from_numbers():
    x = torch.ones(3)
    numbers, sizes = ops.scalar_and_size_arguments(aten.narrow.default, (x, 0, 1), {"length": 2})
    assert (numbers[0] is x, sizes) == (True, [0, 1, 2])
    numbers, sizes = ops.scalar_and_size_arguments(aten.mul.Scalar, (x, 5), {})
    assert (numbers[1], sizes) == (5, [])


def test_an_integer_of_an_operator_of_others_is_a_number(library):
    library.define("times(Tensor x, SymInt n, int[] m) -> Tensor")
    op = torch.ops.piecegraph_ops.times.default
    assert ops.scalar_and_size_arguments(op, (None, 5), {"m": [2]}) == ([None, 5, [2]], [])


def test_a_collective_writes_its_arguments_and_is_awaited():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        calls = list[Any]()

        class Seen(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                if func.namespace == ops.COLLECTIVES:
                    calls.append((func, args, kwargs or {}))
                return func(*args, **(kwargs or {}))

        tensor = torch.ones(2)
        with Seen():
            torch.distributed.all_reduce(tensor)
        ((func, args, kwargs),) = calls
        assert ops.is_mutable(func)
        assert ops.mutated_arguments(func, args, kwargs)[0] == [tensor]
        (again,), work = ops.awaited(func, *args, **kwargs)
        assert again is tensor
        assert type(work) is torch.ScriptObject
        functional = torch.ops._c10d_functional
        assert [*map(ops.returns_early, (func, functional.all_reduce.default))] == [True, True]
        assert not ops.returns_early(functional.wait_tensor.default)
        group = torch.distributed.group.WORLD.group_name
        for op, given in (
            (functional.all_reduce.default, tensor),
            (functional.all_reduce_coalesced.default, [tensor, tensor]),
        ):
            ops.awaited(op, given, "sum", group)
            assert torch._C._distributed_c10d._get_work_registry_size() == 0
    finally:
        torch.distributed.destroy_process_group()
