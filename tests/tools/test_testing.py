"""The pytest plugin finds the faults of small engines, and none in one that is right."""

import gc
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import piecegraph as pg
from piecegraph.tools.testing import CASES, case_of
from tests.ops import define

pytest_plugins = "piecegraph.testing"

HIDDEN, SLOTS, MAX_REQS = 8, 64, 8
library = torch.library.Library("engine_under_test", "DEF")


def attend(x, output):
    """Writes a row per token to its slot, and adds the mean of the request's rows."""
    context = pg.get_forward_context()
    metadata, kv = context.metadata, context.layers["kv"].cache
    kv.index_copy_(0, metadata.slots[: len(x)], x)
    table, lens = metadata.table[metadata.request], metadata.lens[metadata.request]
    past = torch.arange(table.shape[1]) < lens[:, None]
    rows = kv[table] * past[..., None]
    output.copy_((x + rows.sum(1) / lens.clamp(min=1)[:, None])[: len(output)])


define(library, "attend(Tensor x, Tensor(a!) output) -> ()", attend)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(HIDDEN, HIDDEN), torch.nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        hidden = self.up(x)
        output = torch.empty_like(hidden)
        torch.ops.engine_under_test.attend(hidden, output)
        return self.down(output)


FAULTS = (
    "padding keeps slots",
    "lens stale",
    "table reallocated",
    "slots copied",
    "weights replaced",
    "table narrower",
    "keeps results",
    "cache reallocated",
    "metadata for the real size",
    "capture into a live slot",
    "wrong num_reqs",
    "forgot seal",
    "writes the next step early",
)


class Engine:
    """Each request owns eight slots; the last slot of the cache is that of padding."""

    def __init__(self, case, fault):
        self.fault, self.kept = fault, None
        self.model = Model()
        self.layer = SimpleNamespace(cache=torch.zeros(SLOTS + 1, HIDDEN))
        rows = 16
        self.buffers = SimpleNamespace(
            slots=torch.full((rows,), SLOTS),
            request=torch.zeros(rows, dtype=torch.int64),
            lens=torch.zeros(MAX_REQS + 1, dtype=torch.int64),
            table=torch.full((MAX_REQS + 1, 8), SLOTS),
        )
        config = pg.Config(
            splitting_ops=("engine_under_test::attend",),
            inputs={"x": f"float32[num_tokens, {HIDDEN}]"},
            max_num_tokens=rows,
            max_num_reqs=MAX_REQS,
            capture_sizes=(2, 4, 8),
            attention={"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
            compiler="eager",
            cache=False,
        ).changed(**case.settings)
        self.prepared = pg.prepare(
            self.model, config, layers={"kv": self.layer}, backend=case.backend
        )
        self.prepared.watch("kv", self.layer.cache)
        self.numbers = torch.Generator().manual_seed(0)

    def live_state(self):
        return {"kv": self.layer.cache[:SLOTS]}

    def start(self):
        self.prepared.capture(self.dummy_metadata)
        if self.fault != "forgot seal":
            self.prepared.seal()

    def dummy_metadata(self, descriptor, mode):
        self.buffers.slots.fill_(0 if self.fault == "capture into a live slot" else SLOTS)
        return self.padded(descriptor.num_tokens)

    def padded(self, num_tokens):
        buffers = self.buffers
        return SimpleNamespace(
            slots=buffers.slots[:num_tokens],
            request=buffers.request[:num_tokens],
            lens=buffers.lens,
            table=buffers.table,
        )

    def write(self, lengths, padded):
        """The metadata of a step, in the buffers."""
        buffers, fault, end = self.buffers, self.fault, 0
        slots, request = [], []
        lens, table = torch.zeros_like(buffers.lens), torch.full_like(buffers.table, SLOTS)
        for index, length in enumerate(lengths):
            own = torch.arange(index * 8, index * 8 + 8)
            slots += own[:length].tolist()
            request += [index] * length
            lens[index], table[index] = length, own
            end += length
        buffers.slots[:end] = torch.tensor(slots)
        if fault != "padding keeps slots":
            buffers.slots[end:] = SLOTS
        buffers.request[:end], buffers.request[end:] = torch.tensor(request), MAX_REQS
        if fault != "lens stale" or self.first:
            buffers.lens.copy_(lens)
        buffers.table.copy_(table)
        if fault == "table reallocated":
            buffers.table = buffers.table.clone()
        if fault == "table narrower":
            buffers.table = buffers.table[:, :1].contiguous()
        metadata = self.padded(end if fault == "metadata for the real size" else padded)
        if fault == "slots copied":
            metadata.slots = metadata.slots.clone()
        return metadata

    first = True

    def step(self, lengths, is_decode):
        num_tokens, num_reqs = sum(lengths), len(lengths)
        self.prepared.reads_done().synchronize()
        x = torch.randn(num_tokens, HIDDEN, generator=self.numbers)
        if self.fault == "weights replaced" and not self.first:
            self.model.up.weight = torch.nn.Parameter(torch.ones(HIDDEN, HIDDEN))
        if self.fault == "cache reallocated" and not self.first:
            self.layer.cache = self.layer.cache.clone()
        said = max(1, num_reqs - 1) if self.fault == "wrong num_reqs" else num_reqs
        batch = pg.Batch(
            num_tokens, said, is_decode, query_len=1 if is_decode and said == num_reqs else None
        )
        decision = self.prepared.dispatch(batch)
        before = self.layer.cache.clone()
        metadata = self.write(lengths, decision.descriptor.num_tokens)
        result = self.prepared.run(decision, x, metadata=metadata)
        expected = self.plain(x, lengths, before)
        if self.fault == "writes the next step early":
            self.buffers.lens.fill_(1)
        if self.fault == "keeps results":
            result, self.kept = (result, result) if self.kept is None else (self.kept, result)
            rows, state = expected
            expected, self.right = (rows if self.first else self.right, state), rows
        self.first = False
        return (result, self.layer.cache[:SLOTS]), expected

    def plain(self, x, lengths, cache):
        metadata = self.alone(lengths)
        layers = {"kv": SimpleNamespace(cache=cache.clone())}
        with pg.forward_context(pg.ForwardContext(layers, metadata)), torch.no_grad():
            return self.model(x), layers["kv"].cache[:SLOTS]

    def alone(self, lengths):
        """The metadata of a step without padding, in memory of its own."""
        own = Engine.__new__(Engine)
        own.fault, own.first, own.buffers = (
            None,
            True,
            SimpleNamespace(
                **{name: torch.zeros_like(each) for name, each in vars(self.buffers).items()}
            ),
        )
        own.buffers.table = torch.zeros(MAX_REQS + 1, 8, dtype=torch.int64)
        return own.write(lengths, sum(lengths))


@pytest.mark.heavy
def test_an_engine_that_is_right_passes_in_each_mode(graph_case):
    graph_case.check(lambda case: Engine(case, None))


@pytest.mark.heavy
def test_an_engine_that_waits_passes_delayed(delayed_graph_case):
    delayed_graph_case.check(lambda case: Engine(case, None))


@pytest.mark.parametrize("delay", [False, True])
def test_an_engine_that_is_right_passes(delay):
    case = case_of("FULL_AND_PIECEWISE", "lazy", delay=delay)
    case.check(lambda case: Engine(case, None))


def faults_found(fault, mode, strategy, delay=False):
    """What the plugin says of an engine with one fault."""
    case, found = case_of(mode, strategy, delay=delay), None
    try:
        case.check(lambda case: Engine(case, fault))
    except (Exception, pytest.fail.Exception) as error:
        found = f"{type(error).__name__}: {error}"
    gc.collect()  # results that the traceback held
    case.backend.synchronize()
    return found


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("metadata for the real size", "metadata.slots has 7 rows, for the real size"),
        ("capture into a live slot", "wrote to live state 'kv'"),
        ("wrong num_reqs", "num_reqs of the Batch is 6, but it is 7"),
        ("forgot seal", "serves without"),
        ("keeps results", "result 0 is of an earlier step, whose memory the next one overwrites"),
        ("weights replaced", "MovedTensor: up.weight moved"),
        ("cache reallocated", "MovedTensor: layers['kv'].cache moved"),
    ],
)
def test_what_a_tester_missed_is_caught_by_name(fault, message):
    assert message in str(faults_found(fault, "FULL_AND_PIECEWISE", "eager"))


class Unreferenced(Engine):
    """Returns the results of the model alone; the plugin runs the plain model."""

    def step(self, lengths, is_decode):
        self.lengths = lengths
        (result, _), _ = super().step(lengths, is_decode)
        return result

    def keep(self, metadata, decision):
        return self.lengths

    def rebuild(self, lengths, decision):
        return self.alone(lengths)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("fault", [None, "lens stale", "padding keeps slots"])
def test_the_plugin_runs_the_plain_model_itself(fault, delay):
    case, engine = case_of("FULL_AND_PIECEWISE", "eager", delay=delay), list[Any]()

    def make(case):
        engine.append(Unreferenced(case, fault))
        return engine[0]

    def check():
        case.check(
            make,
            keep=lambda *args: engine[0].keep(*args),
            rebuild=lambda *args: engine[0].rebuild(*args),
        )

    if fault is None:
        check()
    else:
        with pytest.raises(AssertionError, match="step [1-9]"):
            check()
    engine.clear()
    gc.collect()
    case.backend.synchronize()


@pytest.mark.parametrize("mode", ["PIECEWISE", "FULL_AND_PIECEWISE"])
def test_a_buffer_that_is_written_before_the_step_ran_is_caught_by_name(mode):
    """Only where work is delayed."""
    fault = "writes the next step early"
    assert faults_found(fault, mode, "eager") is None
    message = str(faults_found(fault, mode, "eager", delay=True))
    assert "RewrittenEarly" in message
    assert "metadata.lens" in message


@pytest.mark.heavy
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_an_engine_is_caught(fault):
    cases = itertools.product(CASES, (False, True))
    caught = {(case, delay): faults_found(fault, *case, delay) for case, delay in cases}
    assert any(caught.values())
