"""Static inputs: fixed addresses, real rows copied, padding as declared, wrong inputs refused."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.config import Padding
from piecegraph.errors import InputMismatch, MovedTensor, SizeOutOfRange
from piecegraph.runtime.core import writes
from piecegraph.runtime.core.padding import PaddingPolicy
from piecegraph.runtime.core.static_inputs import StaticInputs, StaticInputSpec

CPU = torch.device("cpu")
IDS = StaticInputSpec("ids", ("num_tokens",), torch.int64, PaddingPolicy(Padding.SENTINEL, -1))
HIDDEN = StaticInputSpec("hidden", ("num_tokens", 2), torch.float32)
REPEAT = PaddingPolicy(Padding.REPEAT)
POSITIONS = StaticInputSpec("positions", (3, "num_tokens"), torch.int64, REPEAT)


def bind(*specs, limit=8, padded=4, **options):
    inputs = StaticInputs(specs, {"num_tokens": limit}, CPU, **options)
    return inputs.at({"num_tokens": padded})


def load(bound, tensors, real):
    bound.loader(real)(tensors)


def test_real_rows_are_copied_and_padding_is_written():
    bound = bind(IDS, HIDDEN, POSITIONS)
    for view in bound.views:
        view.fill_(99)
    ids, hidden = torch.tensor([5, 6]), torch.rand(2, 2)
    positions = torch.tensor([[0, 1], [2, 3], [4, 5]])
    load(bound, (ids, hidden, positions), (2,))
    assert bound.views[0].tolist() == [5, 6, -1, -1]
    assert torch.equal(bound.views[1], torch.cat([hidden, torch.zeros(2, 2)]))
    assert bound.views[2].tolist() == [[0, 1, 1, 1], [2, 3, 3, 3], [4, 5, 5, 5]]


@pytest.mark.parametrize("rows", [1, 3])
def test_inputs_of_several_types_are_copied_as_integers_whatever_their_strides(monkeypatch, rows):
    """As on a device. A dimension of size 1 is contiguous whatever its stride, and is no view."""
    monkeypatch.setattr(writes, "_one_type", lambda tensors: torch.int32)
    bound, table = bind(IDS, HIDDEN), torch.arange(1, 16).view(3, 5)
    for ids in (table[0, :rows], table[:rows, 0]):
        for hidden in (torch.rand(3, 2), torch.rand(2, 3).T, torch.rand(3, 9)[:, 1:3]):
            load(bound, (ids, hidden[:rows]), (rows,))
            assert bound.views[0].tolist() == [*ids.tolist(), *[-1] * (4 - rows)]
            assert torch.equal(bound.views[1][:rows], hidden[:rows])


def test_failure_25_padding_is_written_at_every_step():
    bound = bind(IDS)
    load(bound, (torch.tensor([1, 2, 3, 4]),), (4,))
    load(bound, (torch.tensor([9]),), (1,))
    assert bound.views[0].tolist() == [9, -1, -1, -1]


@pytest.fixture
def new_memory_is_nan():
    """What `torch.empty` returns holds NaN, whatever the allocator has."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_failure_26_padding_is_finite_from_the_first_step_on(new_memory_is_nan):
    keep = PaddingPolicy(Padding.KEEP)
    bound = bind(StaticInputSpec("kept", ("num_tokens",), torch.float32, keep))
    load(bound, (torch.ones(2),), (2,))
    assert bound.views[0].tolist() == [1, 1, 0, 0]
    load(bound, (torch.full((1,), 2.0),), (1,))
    assert bound.views[0].tolist() == [2, 1, 0, 0]


def test_failure_29_a_sentinel_is_what_the_engine_reserves():
    sentinel = PaddingPolicy(Padding.SENTINEL, 1024)
    bound = bind(StaticInputSpec("slots", ("num_tokens",), torch.int64, sentinel))
    load(bound, (torch.tensor([3]),), (1,))
    assert bound.views[0].tolist() == [3, 1024, 1024, 1024]


def test_nothing_real_pads_everything():
    bound = bind(POSITIONS)
    bound.views[0].fill_(9)
    load(bound, (torch.zeros(3, 0, dtype=torch.int64),), (0,))
    assert bound.views[0].tolist() == [[0] * 4] * 3


def test_w20_any_dimension_and_any_order_of_sizes():
    inputs = StaticInputs([POSITIONS], {"num_tokens": 8}, CPU)
    small, large = inputs.at({"num_tokens": 2}), inputs.at({"num_tokens": 8})
    for bound, size in ((small, 2), (large, 8), (small, 2)):
        given_positions = torch.randint(9, (3, size))
        load(bound, (given_positions,), (size,))
        assert torch.equal(bound.views[0], given_positions)
        assert bound.views[0].is_contiguous()
    assert small.views[0].data_ptr() == large.views[0].data_ptr()


@pytest.mark.parametrize(
    "buffer",
    [torch.zeros(7, dtype=torch.int64), torch.zeros(8, dtype=torch.int32), torch.zeros(8, 1)],
)
def test_an_owned_buffer_of_another_form_is_refused(buffer):
    with pytest.raises(InputMismatch, match=r"'ids' .*prepared for torch.int64 \(8,\) on cpu"):
        bind(IDS, owned={"ids": buffer})


def test_more_rows_than_the_padded_size_are_refused_by_name():
    bound = bind(IDS)
    with pytest.raises(SizeOutOfRange, match="num_tokens = 5 .*0, 4"):
        load(bound, (torch.zeros(5, dtype=torch.int64),), (5,))


def test_buffers_made_in_inference_mode_are_loaded_outside_of_it():
    with torch.inference_mode():
        bound = bind(IDS)
    load(bound, (torch.tensor([1, 2]),), (2,))
    assert bound.views[0].tolist() == [1, 2, -1, -1]


def test_an_owned_buffer_is_not_copied_and_is_padded():
    buffer = torch.full((8,), 7)
    bound = bind(IDS, owned={"ids": buffer})
    buffer[:2] = torch.tensor([1, 2])
    load(bound, (buffer[:2],), (2,))
    assert bound.views[0].data_ptr() == buffer.data_ptr()
    assert buffer.tolist() == [1, 2, -1, -1, 7, 7, 7, 7]


def test_failure_12_another_buffer_than_the_owned_one_is_an_error():
    bound = bind(IDS, owned={"ids": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(MovedTensor, match="input 'ids'"):
        load(bound, (torch.zeros(2, dtype=torch.int64),), (2,))


def test_dense_rows_are_no_part_of_a_buffer_with_gaps():
    memory = torch.zeros(8, 6, dtype=torch.int64)
    spec = StaticInputSpec("x", ("num_tokens", 3), torch.int64)
    inputs = StaticInputs(
        [spec], {"num_tokens": 8}, CPU, owned={"x": memory[:, :3]}, any_layout=True
    )
    bound = inputs.at({"num_tokens": 4})
    load(bound, (memory[:2, :3],), (2,))
    with pytest.raises(InputMismatch, match=r"strides \(3, 1\).*strides \(6, 1\)"):
        load(bound, (memory.as_strided((2, 3), (3, 1)),), (2,))


paddings = st.sampled_from(Padding)


@given(st.data(), paddings, st.sampled_from([("a", "b"), ("b", 2, "a"), (2, "a"), ("a", "b", "a")]))
def test_any_loads_equal_padding_by_hand(data, padding, dims):
    """Two padded sizes share the memory; each load leaves the padding of its own real sizes."""
    limits = {"a": 5, "b": 4}
    policy = PaddingPolicy(padding, 7 if padding is Padding.SENTINEL else 0)
    spec = StaticInputSpec("x", dims, torch.int64, policy)
    inputs = StaticInputs([spec], limits, CPU)
    bounds = []
    for _ in range(2):
        padded = {name: data.draw(st.integers(1, limit)) for name, limit in limits.items()}
        bounds.append((padded, inputs.at(padded), dict[tuple[int, ...], Any]()))
    bounds[0][1].views[0].random_(100, 200)
    for again in range(2 * data.draw(st.integers(1, 3))):
        if again % 2 == 0:  # else the same sizes with other rows
            padded, bound, loaders = data.draw(st.sampled_from(bounds))
            real = {name: data.draw(st.integers(1, size)) for name, size in padded.items()}
        x = torch.randint(100, spec.shape(real))
        expected = padded_by_hand(bound.views[0].clone(), x, padding)
        key = tuple(real.values())
        loaders.setdefault(key, bound.loader(key))((x,))
        assert torch.equal(bound.views[0], expected)


def padded_by_hand(expected, x, padding):
    indices = torch.cartesian_prod(*[torch.arange(n) for n in expected.shape])
    for index in indices.view(-1, x.dim()):
        position = tuple(index.tolist())
        nearest = tuple(min(i, n - 1) for i, n in zip(position, x.shape, strict=True))
        if position == nearest or padding is Padding.REPEAT:
            expected[position] = x[nearest]
        elif padding is not Padding.KEEP:
            expected[position] = 7 if padding is Padding.SENTINEL else 0
    return expected


def test_padding_that_is_still_there_is_not_written_again():
    bound = bind(IDS)
    view, loaders = bound.views[0], [bound.loader((n,)) for n in range(5)]
    loaders[1]((torch.tensor([9]),))
    view[3] = 5  # shows what is written
    loaders[1]((torch.tensor([8]),))
    loaders[2]((torch.tensor([7, 6]),))
    assert view.tolist() == [7, 6, -1, 5]
    loaders[1]((torch.tensor([9]),))  # fewer real rows
    assert view.tolist() == [9, -1, -1, -1]
    bound.fill_padding()  # a dummy batch
    view[3] = 5
    loaders[1]((torch.tensor([9]),))
    assert view.tolist() == [9, -1, -1, -1]


def test_a_load_that_fails_leaves_no_padding_to_rely_on():
    buffer = torch.zeros(8, dtype=torch.int64)
    owned = StaticInputSpec("owned", ("num_tokens",), torch.int64)
    bound = bind(IDS, owned, owned={"owned": buffer})
    one, three = bound.loader((1,)), bound.loader((3,))
    one((torch.tensor([9]), buffer[:1]))
    with pytest.raises(MovedTensor):
        three((torch.tensor([1, 2, 3]), buffer[:3].clone()))
    one((torch.tensor([9]), buffer[:1]))
    assert bound.views[0].tolist() == [9, -1, -1, -1]
