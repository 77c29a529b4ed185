"""A dummy batch leaves no trace: weights, buffers, engine buffers, KV cache, random state."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from piecegraph import Batch, PreparedModel, get_forward_context, prepare
from piecegraph.errors import OtherRowsWritten
from piecegraph.runtime.core.preserved import WHOLE, SavedMemory, StateTooLarge, preserve

from ..conftest import Computes, captured, small_config, strict_backend

pytestmark = pytest.mark.compile

SLOTS, MAX_TOKENS = 64, 16
RESERVED = SLOTS - 1


def keep(x, slots):
    get_forward_context().layers["kv"].index_copy_(0, slots, x)


def store(x, slots, cache):
    cache.index_copy_(0, slots, x)


def scaled(x, out):
    metadata = get_forward_context().metadata
    out.copy_(x * metadata.rows[: len(x)] * metadata.scale)


class Model(nn.Module):
    """Writes three KV caches by `slots`: its own, an argument, and one in the forward context that
    the library does not know. Counts its rows. Its own cache is a part of larger memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4), requires_grad=False)
        self.around = torch.rand(SLOTS + 3, 4)
        self.register_buffer("cache", self.around[2:-1])
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x, slots, outer):
        y = x * self.weight
        self.cache.index_copy_(0, slots, y)
        torch.ops.dummy_tests.store(y, slots, outer)
        torch.ops.dummy_tests.keep(y, slots)
        self.rows.add_(x.shape[0])
        return y + self.cache[slots] + outer[slots]


@pytest.fixture(scope="module", autouse=True)
def ops(temporary_op):
    schema = "(Tensor x, Tensor slots, Tensor(a!) cache) -> ()"
    temporary_op("dummy_tests::store", schema, store)
    temporary_op("dummy_tests::scaled", "(Tensor x, Tensor(a!) out) -> ()", scaled)
    temporary_op("dummy_tests::keep", "(Tensor x, Tensor slots) -> ()", keep)


def prepared_for(model, kv, buffers=None, **settings):
    config = small_config(
        MAX_TOKENS,
        splitting_ops=("dummy_tests::store", "dummy_tests::keep"),
        inputs={
            "x": "float32[num_tokens, 4]",
            "slots": "int64[num_tokens]",
            "outer": f"float32[{SLOTS}, 4]",
        },
        steps={"padding": {"slots": RESERVED}},
        capture_sizes=(2, 4, 8),
        graph_mode="FULL_AND_PIECEWISE",
        **settings,
    )
    return prepare(
        model, config, layers={"kv": kv}, backend=strict_backend(), input_buffers=buffers
    )


def contents(*values):
    tensors = [t for value in values for t in (value if isinstance(value, list) else [value])]
    return [
        bytes(tensor.detach().clone().reshape(-1).view(torch.uint8).numpy()) for tensor in tensors
    ]


def warm_ranges(prepared):
    prepared.warm_up(skip=("capture",))


ACTIONS = {
    "capture": PreparedModel.capture,
    "warm_up": PreparedModel.warm_up,
    "ranges": warm_ranges,
    "memory_plan": lambda prepared: prepared.parts.strategies.memory_plan(),
    "idle": lambda prepared: prepared.parts.strategies.idle(1e9),
    "recapture": lambda prepared: (prepared.capture(), prepared.release(), prepared.capture()),
}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("action", ACTIONS)
def test_failure_7_no_dummy_batch_leaves_a_trace(action, traced):
    model, kv = Model(), torch.rand(SLOTS, 4)
    buffers = {
        "x": torch.rand(MAX_TOKENS, 4),
        "slots": torch.arange(MAX_TOKENS),
        "outer": torch.rand(SLOTS, 4),
    }
    strategy = "delayed" if action == "idle" else "eager"
    prepared = prepared_for(model, kv, buffers, strategy=strategy, compile=traced)
    prepared.run(prepared.dispatch(Batch(5, 5)), **step(buffers, 5))
    if action == "idle":
        prepared.capture()
    state = [*model.parameters(), *model.buffers(), *buffers.values()]
    state += [model.around, kv[:RESERVED]]
    before = contents(state, torch.get_rng_state())
    ACTIONS[action](prepared)
    assert contents(state, torch.get_rng_state()) == before
    assert prepared.recordings() or action in ("ranges", "memory_plan")


def step(buffers, num_tokens):
    return {
        name: buffer if name == "outer" else buffer[:num_tokens] for name, buffer in buffers.items()
    }


@pytest.mark.parametrize("strategy", ["delayed", "lazy"])
def test_failure_7_captures_between_steps_write_no_live_row(strategy):
    """Inputs are copied: the static buffers hold the rows of the step before the capture."""
    model, kv = Model(), torch.full((SLOTS, 4), 777.0)
    prepared = prepared_for(model, kv, strategy=strategy)
    prepared.capture()
    model.cache.fill_(777.0)
    outer = torch.full((SLOTS, 4), 777.0)
    rows = 0
    for first in (0, 8, 16, 24, 32):
        for count in (8, 3, 2):
            x, slots = torch.rand(count, 4), torch.arange(first, first + count)
            batch = Batch(count, count, is_decode=True, query_len=1)
            prepared(x, slots, outer, batch=batch)
            rows += count
            model.cache[slots] = outer[slots] = kv[slots] = 777.0
            for cache in (model.cache, outer, kv):
                assert cache[:RESERVED].eq(777.0).all()
    assert prepared.recordings()
    assert model.rows >= rows


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("strategy", ["delayed", "lazy", "eager"])
def test_a_capture_between_metadata_and_its_step_leaves_it_as_it_was(strategy, traced):
    """The step read that of the dummy batch: zeros, and another scale."""

    def forward(x):
        out = torch.empty_like(x)
        torch.ops.dummy_tests.scaled(x, out)
        return out + 1

    way = {"splitting_ops": ("dummy_tests::scaled",), "strategy": strategy, "compile": traced}
    config = small_config(graph_mode="PIECEWISE", capture_sizes=(2, 4, 8), **way)
    prepared = prepare(Computes(forward), config, backend=strict_backend())
    rows, other = torch.zeros(8, 1), torch.ones(8, 1)
    metadata, made = SimpleNamespace(rows=rows, scale=1), {}

    def metadata_for(descriptor, mode):
        metadata.rows, metadata.scale = rows.zero_(), 0
        other.fill_(0.5).add_(1)  # of another step of the engine
        if descriptor not in made:
            made[descriptor] = torch.empty(8, 1).fill_(9)
        return metadata

    prepared.capture(metadata_for)
    if strategy == "eager":
        prepared.release(keep="plan")
    for size in (3, 2, 7):
        rows[:], metadata.scale = 5, 7
        x = torch.rand(size, 4)
        assert prepared(x, batch=Batch(size, 1), metadata=metadata).equal(x * 5 * 7 + 1)
        assert other.eq(1).all()
    assert len(prepared.recordings()) == 3
    assert all(tensor.eq(9).all() for tensor in made.values())
    prepared.close()


OF_LARGE = {
    "inputs": {"x": "float32[num_tokens, 16]", "slots": "int64[num_tokens]"},
    "steps": {"padding": {"slots": 5000}},
}


class Large(nn.Module):
    """Writes to a buffer where `slots` says, or elsewhere."""

    def __init__(self, other_rows):
        super().__init__()
        self.register_buffer("cache", torch.rand(WHOLE // 64 + 100, 16))
        self.other_rows = other_rows

    def forward(self, x, slots):
        self.cache.index_copy_(0, slots * 2 + 7 if self.other_rows else slots, x)
        return x + 1


@pytest.mark.needs_part("proof")  # which finds it at prepare
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("other_rows", [False, True])
def test_of_a_large_buffer_only_rows_are_kept(other_rows, traced):
    model = Large(other_rows)
    config = small_config(16, **OF_LARGE, capture_sizes=(2, 8), compile=traced)
    before = model.cache.clone()
    if other_rows:
        with pytest.raises(OtherRowsWritten, match=r"wrote to rows \[(7, )?9\] of dimension 0"):
            prepare(model, config, backend=strict_backend()).capture()
        return
    prepared = prepare(model, config, backend=strict_backend())
    with LargestResult() as largest:
        warm_ranges(prepared)
    assert largest.num_bytes < WHOLE // 4
    prepared.capture()
    assert torch.equal(model.cache, before)
    assert len(prepared.recordings()) == 2


def test_of_a_large_tensor_of_one_dimension_only_elements_are_kept():
    large, slots = torch.arange(WHOLE // 4 + 100.0), torch.tensor([3, 4096])
    before = large.clone()
    with LargestResult() as largest, preserve([large], [slots]):
        large[slots] = -1.0
    assert largest.num_bytes < WHOLE // 4
    with preserve([large], [slots], check=True):
        large[4096] = -1.0
    assert torch.equal(large, before)
    with (
        pytest.raises(OtherRowsWritten, match=rf"rows \[{WHOLE // 4}\] of dimension 0"),
        preserve([large], [slots], check=True),
    ):
        large[-1] = -1.0


def test_first_rows_are_kept_without_limit_only_if_no_input_is_an_index():
    """A block of a KV cache is large: as many as a step has tokens would be most of it."""
    blocks = torch.zeros(1024, 64, 128)
    x, slots = torch.ones(600, 2), torch.tensor([1000])
    for inputs, expected in (([x], [*range(600)]), ([x, slots], [*range(512), 1000])):
        ((_, rows, _),) = SavedMemory([blocks], inputs).contents()
        assert rows.tolist() == expected


def test_a_large_buffer_may_be_written_twice():
    """Without a trace each write is undone alone, in reverse: sums are those before the write."""

    class Twice(Large):
        def forward(self, x, slots):
            return super().forward(super().forward(x, slots), slots)

    model = Twice(other_rows=False)
    before = model.cache.clone()
    captured(model, 16, **OF_LARGE, capture_sizes=(2,), compile=False)
    assert torch.equal(model.cache, before)


DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_of_any_kind_is_restored_bit_for_bit(dtype, inference):
    def bits(tensor):
        return tensor.contiguous().view(torch.uint8)

    with torch.inference_mode(inference):
        large = torch.ones(WHOLE + 64, 2).to(dtype)
        one_row = torch.ones(1, 4).to(dtype)
        nan = (torch.zeros(3) / 0).to(dtype)
    wide, rows = one_row.expand(3, 4), torch.tensor([5])
    tensors = [large, nan, wide]
    before = [bits(tensor).clone() for tensor in tensors]
    saved = SavedMemory(tensors, [rows])
    assert not any(map(torch.any, saved.changed(saved.now())))
    with torch.inference_mode():
        large[5], nan[0] = False, False
        one_row.zero_()
    assert [int(each.sum()) for each in saved.changed(saved.now())] == [2, 1, 12]
    saved.restore()
    assert all(map(torch.equal, map(bits, tensors), before))


def test_state_that_is_too_large_is_not_copied():
    first, slots = torch.zeros(1024), torch.tensor([0])
    with LargestResult() as largest, pytest.raises(StateTooLarge):
        SavedMemory([first, torch.zeros(8)], [slots], most=first.nbytes)
    assert largest.num_bytes < first.nbytes


class LargestResult(TorchDispatchMode):
    """The bytes of the largest new tensor."""

    __module__ = "piecegraph"  # an engine's mode would be refused
    num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        storages = {each.untyped_storage().data_ptr() for each in given}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in storages:
                self.num_bytes = max(self.num_bytes, tensor.nbytes)
        return result
