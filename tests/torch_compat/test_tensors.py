"""Tensors below the public surface: modes, storage identity, fakes, paths into trees."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from piecegraph.torch_compat.basics import tensors
from piecegraph.torch_compat.basics.tensors import (
    has_default_device,
    never_traced,
    under_autocast,
    under_this_autocast,
    without_regions,
)


def test_without_modes_hides_calls_from_a_mode():
    seen = []

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args, kwargs):
            seen.append(func)
            return func(*args, **kwargs)

    with Spy():
        with tensors.without_modes():
            torch.ones(2)
        assert not seen
        torch.ones(2)
    assert seen


def test_storages_are_told_apart_also_when_freed():
    tensor = torch.rand(3)
    assert tensors.storage_id(tensor[1:]) == tensors.storage_id(tensor)
    taken = tensors.storage_id(tensor)
    weak = tensors.weak_storage(tensor)
    del tensor
    others = [torch.rand(3) for _ in range(1000)]
    assert weak.expired()
    assert taken not in {tensors.storage_id(other) for other in others}


def test_an_unowned_alias_of_nothing_is_nothing():
    assert tensors.unowned_alias(torch.rand(0, 3)).shape == (0, 3)


def test_a_part_of_a_storage_gives_the_tensor_again():
    tensor = torch.rand(3, 4)[1:, ::2]
    part = tensors.part_of_storage(tensor)
    assert torch.equal(tensors.alias_of(tensor.untyped_storage(), tensor.dtype, part), tensor)


def test_faking_is_noticed():
    assert not tensors.is_faking()
    with tensors.fresh_fake_mode():
        assert tensors.is_faking()
    assert not tensors.is_faking()


def test_gradients_are_turned_off_and_on():
    tensors.set_grad_enabled(False)
    assert not tensors.is_grad_enabled()
    tensors.set_grad_enabled(True)
    assert tensors.is_grad_enabled()


def test_a_detached_view_is_a_view_of_the_same_form_at_its_present_address():
    base = torch.arange(12.0).reshape(3, 4).clone()
    view = base[1:, ::2]
    found = tensors.detached(view)
    assert found._base.shape == base.shape
    assert (found.stride(), found.tolist()) == (view.stride(), view.tolist())
    before, base.data = view.tolist(), torch.zeros(3, 4)
    assert found.tolist() == before
    for other in (base.view(torch.int32), torch.ones(2, dtype=torch.complex64).conj()):
        assert tensors.detached(other).tolist() == other.tolist()


def test_unowned_alias_has_the_memory_and_does_not_keep_it():
    tensor = torch.arange(6.0).view(2, 3).t()
    weak = tensors.weak_storage(tensor)
    alias = tensors.unowned_alias(tensor)
    assert torch.equal(alias, tensor)
    assert alias.stride() == tensor.stride()
    tensor[0, 1] = 7
    assert alias[0, 1] == 7
    del tensor
    assert weak.expired()


def test_a_fake_tensor_is_told_from_a_real_one():
    real = torch.rand(2)
    assert not tensors.is_fake(real)
    assert tensors.is_fake(tensors.fresh_fake_mode().from_tensor(real))


def test_in_place_writes_are_counted():
    tensor = torch.zeros(2)
    before = tensors.writes_counted(tensor)
    tensor.view(-1).add_(1)
    assert tensors.writes_counted(tensor) == before + 1


class Pair(NamedTuple):
    left: Any
    right: Any


def test_leaves_have_keys_positions_and_names_as_paths():
    value = {"a": [1, None], "b": Pair(2, (3,))}
    assert tensors.leaves_with_paths(value) == [
        (("a", 0), 1),
        (("a", 1), None),
        (("b", "left"), 2),
        (("b", "right", 0), 3),
    ]


def test_a_tree_is_mapped_as_torch_maps_it():
    x = torch.ones(2)
    tree = (x, [1, None, "a"], {"b": Pair(x, torch.Size([2])), "a": torch.float32}, slice(x))
    torchs = torch.utils._pytree.tree_map_only
    for kinds, fn in ((torch.Tensor, lambda each: "x"), ((int, type(None)), str)):
        mapped = tensors.tree_map_only(kinds, fn, tree)
        assert repr(mapped) == repr(torchs(kinds, fn, tree))
        assert list(mapped[2]) == ["b", "a"]


def test_an_alias_of_an_inference_tensor_is_a_normal_tensor():
    with torch.inference_mode():
        made = torch.rand(3, 4)[1:, ::2]
        alias = tensors.normal_alias(made)
    assert made.is_inference()
    assert not alias.is_inference()
    alias.fill_(5)
    assert made.eq(5).all()


def test_autocast_is_noticed():
    assert not tensors.is_autocast_enabled()
    with torch.autocast("cpu", torch.bfloat16):
        assert tensors.is_autocast_enabled()
        with torch.autocast("cpu", enabled=False):
            assert not tensors.is_autocast_enabled()


def test_the_memory_of_a_wrapper_subclass_is_that_of_its_inner_tensors():
    from torch.testing._internal.two_tensor import TwoTensor

    one, two, three = torch.rand(2), torch.rand(2), torch.rand(2)
    wrapper = TwoTensor(TwoTensor(one, two), TwoTensor(three, three))
    assert tensors.is_wrapper_subclass(wrapper)
    assert not tensors.is_wrapper_subclass(one)
    places = [tensor.data_ptr() for tensor in tensors.inner_tensors(wrapper)]
    assert places == [t.data_ptr() for t in (one, two, three, three)]
    assert tensors.inner_tensors(one) == [one]
    seen = []
    torch.vmap(
        lambda row: (seen.extend(map(torch.Tensor.data_ptr, tensors.inner_tensors(row))), row)[1]
    )(one)
    assert seen == [one.data_ptr()]


def test_parts_of_a_subclass_are_its_inner_tensors_and_its_context():
    from torch.testing._internal.two_tensor import TwoTensor

    one, two = torch.rand(2), torch.rand(2)
    inner, context = tensors.subclass_parts(TwoTensor(one, two))
    assert inner == {"a": one, "b": two}
    assert context is None
    assert tensors.subclass_parts(one) == ({}, None)


class Named:
    """A value of an opaque type."""

    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return isinstance(other, Named) and other.name == self.name

    def __hash__(self):
        return hash(self.name)

    def __fx_repr__(self):
        return f"Named({self.name!r})", {"Named": Named}


def test_values_of_opaque_types_are_known(monkeypatch):
    opaque = pytest.importorskip("torch._library.opaque_object")
    if torch.__version__ < "2.12":  # it asks for a metaclass of its own
        meta = pytest.importorskip("torch._opaque_base").OpaqueBaseMeta
        monkeypatch.setitem(globals(), "Named", meta("Named", (), dict(vars(Named))))
    assert not tensors.is_opaque_value(Named)
    opaque.register_opaque_type(Named, typ="value", hoist=True)
    assert tensors.is_opaque_value(Named)
    assert tensors.opaque_source(Named("a")) == ("Named('a')", {"Named": Named})
    stand_in = tensors.FakeScriptObject(Named("a"), "", Named("a"))
    assert tensors.opaque_value(stand_in) == Named("a")
    assert tensors.opaque_value(torch.ones(1)) is None


def test_modes_of_the_form_test():
    assert tensors.inference_and_grad() == (False, True)
    with torch.inference_mode():
        assert tensors.inference_and_grad() == (True, False)
    with torch.no_grad():
        assert tensors.inference_and_grad() == (False, False)


def test_forms_of_several_tensors_are_tested_at_once():
    test = tensors.form_test([torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)])
    assert test(torch.ones(3, 2).t(), torch.ones(4, dtype=torch.int64))
    assert not test(torch.ones(2, 4), torch.ones(4, dtype=torch.int64))
    assert not test(torch.ones(2, 3), torch.ones(4, dtype=torch.int32))
    assert not test(torch.ones(2, 3, dtype=torch.float64), torch.ones(4, dtype=torch.int64))
    test = tensors.form_test([torch.zeros(2, 3), torch.zeros(())], any_rows=True)
    assert test(torch.ones(4, 3), torch.ones(()))
    assert not test(torch.ones(3, 2).t(), torch.ones(()))


def test_reads_of_values_and_of_memory_are_told_apart():
    one, copies = torch.ones(()), copy.deepcopy
    for call, values, memory in (
        (lambda: one.numpy(), True, True),
        (lambda: torch.tensor([one, 2.0]), True, True),
        (lambda: torch.tensor(data=[1.0]), False, False),
        (lambda: one + 1, False, False),
        (lambda: copies(one), False, True),
        (lambda: torch.from_dlpack(one), False, True),
    ):
        seen: list[tuple[bool, bool]] = []

        class Sees(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                given = func, args, kwargs or {}
                seen.append((tensors.reads_values(*given), tensors.reads_memory(*given)))  # noqa: B023
                return func(*args, **(kwargs or {}))

        with Sees():
            call()
        assert tuple(map(any, zip(*seen, strict=True))) == (values, memory)


def test_tensors_inside_a_function_transform_are_known():
    seen = []
    torch.vmap(lambda x: seen.append(tensors.is_transformed(x)) or x)(torch.zeros(2))
    assert seen == [True]
    assert not tensors.is_transformed(torch.zeros(2))
    assert not tensors.is_transformed("x")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j]).conj().imag,
        torch.tensor(True),
        torch.rand(3, 0),
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=str,
)
def test_the_bytes_of_elements_are_those_of_numpy(tensor):
    found = tensors.as_bytes(tensor)
    assert found.dtype is torch.uint8
    assert found.numpy().tobytes() == tensor.detach().resolve_conj().resolve_neg().numpy().tobytes()


def test_memory_is_used_while_a_tensor_is_on_it():
    tensor = torch.rand(4)
    view, storage, weak = tensor[1:], tensor.untyped_storage(), tensors.weak_storage(tensor)
    del tensor
    assert tensors.is_used(weak)
    del view
    assert not tensors.is_used(weak)  # the object of the storage does not count
    assert storage.nbytes() == 16
    del storage
    assert not tensors.is_used(weak)


class Seen(tensors.LightDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


class SeenInside(Seen):
    sees_inside = True


def test_modes_run_operators_of_higher_order_and_see_them_or_what_they_call():
    def add(carry, row):
        return carry + row, carry * row

    x = torch.randn(3, 4)
    for kind, expected in (
        (Seen, {"scan"}),
        (SeenInside, {"aten::add.Tensor", "aten::mul.Tensor"}),
    ):
        with kind() as mode:
            total, _ = torch.ops.higher_order.scan(add, [x[0]], [x[1:]], ())
        assert {*mode.names} & {"scan", "aten::add.Tensor", "aten::mul.Tensor"} == expected
        assert torch.equal(total, x[0] + x[1] + x[2])


class Counted(Seen):
    @classmethod
    def ignore_compile_internals(cls):
        """Regions run compiled."""
        return True


def test_modes_of_threads_that_overlap_make_no_region_compile_again(
    monkeypatch,
):
    flag = "_is_in_any_mode_without_ignore_compile_internals"
    monkeypatch.setattr(torch.utils._python_dispatch, flag, False)  # and is restored afterwards
    compiled, ran = [], []

    def backend(graph, inputs):
        def run(*args):
            ran.append(args)
            return graph(*args)

        compiled.append(graph)
        return run

    region = torch.compile(lambda x: x.sin() + 1, backend=backend)
    other, own = Dispatch(), Counted()
    with ThreadPoolExecutor(1) as thread:
        thread.submit(other.__enter__).result()
        own.__enter__()
        thread.submit(other.__exit__, None, None, None).result()
        own.__exit__(None, None, None)
    for _ in range(3):
        with Counted(), Counted():
            region(torch.rand(4))
            with Counted():
                pass
            region(torch.rand(4))
    assert len(compiled) == 1
    assert len(ran) == 6
    with Seen():  # runs it as it is written
        region(torch.rand(4))
    assert len(ran) == 6


class Dispatch(TorchDispatchMode):
    pass


class Function(torch.overrides.TorchFunctionMode):
    pass


@pytest.mark.parametrize("kind", [Function, Dispatch])
def test_modes_are_stated_and_the_default_device_is_not_one(kind):
    with torch.device("cpu"):
        assert tensors.active_modes() == []
        with kind() as mode:
            assert tensors.active_modes() == [mode]


def test_the_modes_that_were_entered_last():
    assert tensors.last_modes() == (None, None)
    assert tensors.num_dispatch_modes() == tensors.num_function_modes() == 0
    with Dispatch() as dispatch, Function() as function:
        assert tensors.last_modes() == (dispatch, function)
        assert tensors.num_dispatch_modes() == tensors.num_function_modes() == 1
    with torch.device("meta"), Dispatch() as dispatch, Function() as function:
        with tensors.OwnFunctionMode():
            assert tensors.modes_of_others() == [function, dispatch]
    assert tensors.modes_of_others() == []


def test_has_plain_memory():
    rows = torch.ones(2, 3)
    assert tensors.has_plain_memory(rows)
    assert tensors.has_plain_memory(torch.nn.Parameter(rows).t())
    others = [rows.to_sparse(), tensors.FakeTensorMode().from_tensor(rows), [1.0], None]
    assert not any(map(tensors.has_plain_memory, others))


def test_a_function_keeps_the_autocast_it_was_made_under():
    x = torch.randn(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        kept = under_this_autocast(torch.mm)
    assert kept(x, x).dtype is torch.bfloat16
    assert under_this_autocast(torch.mm)(x, x).dtype is torch.float32
    stated = under_autocast(torch.mm, ("cpu", torch.float16, True, True))
    assert stated(x, x).dtype is torch.float16


@pytest.mark.compile
def test_functions_that_dynamo_never_traces_and_regions_that_run_uncompiled():
    torch._dynamo.reset()
    traced = []

    def backend(graph, _):
        traced.append(graph)
        return graph.forward

    def plain(x):
        return x + 1

    never_traced(plain)
    assert torch.compile(plain, backend=backend)(torch.ones(1)).tolist() == [2.0]
    region = torch.compile(lambda x: x * 3, backend=backend)
    with without_regions():
        assert region(torch.ones(1)).tolist() == [3.0]
    assert traced == []
    assert region(torch.ones(1)).tolist() == [3.0]
    assert len(traced) == 1


def test_a_default_device_is_known():
    assert not has_default_device()
    with torch.device("cpu"):
        assert has_default_device()
    assert not has_default_device()


@pytest.mark.parametrize("inference", [False, True])
def test_contents_are_written_back_in_any_mode(inference):
    with torch.inference_mode(inference):
        tensor = torch.ones(3)
    parameter = torch.nn.Parameter(torch.ones(3))
    for each in (tensor, parameter):
        tensors.write_back(each, torch.zeros(3))
        assert each.tolist() == [0.0, 0.0, 0.0]


def test_containers_come_before_what_they_hold():
    value = {"a": [1, None], "b": Pair(2, ())}
    found = [(path, type(each)) for path, each in tensors.containers_with_paths(value)]
    assert found == [((), dict), (("a",), list), (("b",), Pair), (("b", "right"), tuple)]


class OwnFunction(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs)


class OwnDispatch(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_classes_with_operators_of_their_own():
    plain = torch.ones(2)
    parameter = torch.nn.Parameter(plain)
    function = plain.as_subclass(OwnFunction)
    assert list(map(tensors.has_own_operators, (plain, parameter, function))) == [0, 0, 1]
    classes = (torch.Tensor, torch.nn.Parameter, OwnFunction, OwnDispatch)
    assert list(map(tensors.has_own_dispatch, classes)) == [0, 0, 0, 1]
