"""A decoder-like model that is traced once, served on the replay backend with everything poisoned.

Attention adds up the rows of a request, so a wrong row anywhere spoils those after it. Where
requests start is in a buffer that keeps its place, as graphs of whole batches need it.
"""

from __future__ import annotations

import json
import os
import threading
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from piecegraph import (
    Batch,
    Config,
    ForwardContext,
    GraphMode,
    forward_context,
    get_forward_context,
    prepare,
)
from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir import registered_compilers as registry
from piecegraph.runtime.parts.starts.tracing_thread import TracingThread

from ..conftest import Served, compile_once, compiled_by, prepare_on_replay, strict_backend
from .hostile_engine import HostileEngine

MAX_TOKENS, HIDDEN, LAYERS = 16, 4, 3
HOSTILE = "HOSTILE_ENGINE"
"""The variable with the file that is told how often the hostile engine did what."""


@dataclass
class Stage:
    """What the op finds in the forward context as its layer; `fault` is raised in the op."""

    starts: Tensor = field(default_factory=lambda: torch.arange(MAX_TOKENS))
    fault: BaseException | None = None
    gain: float = 1.0


def attend(x, out, layer_name):
    """out[i] = sum of the rows of i's request up to i."""
    stage = get_forward_context().layers[layer_name]
    if stage.fault is not None:
        raise stage.fault
    starts = stage.starts[: len(x)]
    total = x.cumsum(0)
    out.copy_((total - total[starts] + x[starts]) * stage.gain)


class Scale(nn.Module):
    """Elementwise, so that padding does not change how a row is rounded; each weight matters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x):
        return (x * self.weight + self.bias).abs()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Scale() for _ in range(LAYERS))
        self.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            out = torch.empty_like(x)
            torch.ops.live_tests.attend(x, out, "stage")
            x = x + out
        return x * 2


class Gained(Model):
    def __init__(self, gain=2.0):
        super().__init__()
        self.gain = gain

    def forward(self, x):
        return super().forward(x) * self.gain


class MixesRows(Model):
    def forward(self, x):
        return super().forward(x) + x.nan_to_num(7.0).sum(0)


class Scaled(torch.Tensor):
    """Numbers and a scale, as of a quantized weight; a result of any operator is a plain tensor."""

    def __new__(cls, numbers, scale):
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=torch.float32)

    def __init__(self, numbers, scale):
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self):
        return ["numbers", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def plain(value):
            return value.numbers * value.scale if isinstance(value, cls) else value

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@pytest.fixture(scope="session")
def attend_op(temporary_op):
    schema = "(Tensor x, Tensor(a!) out, str layer_name) -> ()"
    return temporary_op("live_tests::attend", schema, attend)


@pytest.fixture(scope="session")
def mix_op(temporary_op):
    def mix(x, out):
        out.copy_(x.cumsum(0))

    return temporary_op("live_tests::mix", "(Tensor x, Tensor(a!) out) -> ()", mix)


DECODER = {
    "splitting_ops": ("live_tests::attend",),
    "inputs": {"x": f"float32[num_tokens, {HIDDEN}]"},
    "steps": {"padding": {"x": float("nan")}},
    "max_num_tokens": MAX_TOKENS,
    "max_num_reqs": MAX_TOKENS,
}
"""Settings of the model."""


@pytest.fixture(scope="session")
def compiled(attend_op):
    return compile_once(Model(), **DECODER)


@dataclass
class LiveServed(Served):
    """A served decoder, with the plain model it was made from and its stage."""

    model: nn.Module
    stage: Stage

    def step(self, *lengths):
        """A checked step of requests with these numbers of new tokens."""
        self.stage.starts.copy_(starts_of(lengths))
        return self.check(self.batch(*lengths))

    def batch(self, *lengths):
        decode = max(lengths) == 1
        return Batch(sum(lengths), len(lengths), is_decode=decode, query_len=1 if decode else None)


def live_served(prepared, model, stage):
    def expected(x):
        with forward_context(ForwardContext({"stage": stage})), torch.no_grad():
            return model(x)

    return LiveServed(prepared, expected, model, stage)


def starts_of(lengths):
    """For each row the first row of its request; a row of padding is a separate request."""
    starts = torch.arange(MAX_TOKENS)
    begin = 0
    for length in lengths:
        starts[begin : begin + length] = begin
        begin += length
    return starts


@pytest.fixture
def serve(compiled):
    def serve(
        sizes=(2, 4, 8),
        mode=GraphMode.FULL_AND_PIECEWISE,
        options=None,
        input_buffers=None,
        model=None,
        **settings,
    ):
        base, traced = compiled
        model, stage = model or Model(), Stage()
        config = base.changed(**settings)
        if config.compile:
            code = replace(traced, model=model, conditions=None).rebound()
        else:
            with forward_context(ForwardContext({"stage": stage})):
                code = compiled_by(config, model)
        given = {"stage": stage}, options or {}, input_buffers
        prepared = prepare_on_replay(code, config, mode, sizes, *given)
        return live_served(prepared, model, stage)

    return serve


class Texts:
    """An entry point of a compiler whose artifact of a piece is the piece's Python source."""

    name = "texts"

    def __init__(self, before=lambda: None):
        """`before` is called before each piece is compiled."""
        self.before = before

    def load(self):
        return Compiler(self.name, self.compile, self.load_artifacts, version="1")

    def compile(self, graph, inputs, options):
        self.before()
        blobs = {"code": graph.code.encode()}
        built = self.load_artifacts([blobs])[0], blobs
        return lambda: built

    def load_artifacts(self, artifacts):
        return [self._loaded(blobs["code"].decode()) for blobs in artifacts]

    def _loaded(self, code):
        names = {"torch": torch, "device": torch.device}
        exec(code, names)
        return lambda args: names["forward"](None, *args)


LENGTHS = ((1,), (1, 1, 1), (5,), (3, 1), (16,), (1,) * 8, (2, 7))


@pytest.fixture
def hostile_engine(monkeypatch):
    """Where HOSTILE_ENGINE names a file, an engine disturbs each test; no call of its own fails."""
    if HOSTILE not in os.environ:
        yield None
        return
    engine, join = HostileEngine(), TracingThread.join

    def join_while_disturbed(thread, timeout_s=None):
        # In a shorter wait it begins nothing: it might wait for a lock of the thread meanwhile.
        long = timeout_s is None or timeout_s >= 0.1
        waits = long and threading.current_thread() is threading.main_thread()
        with engine.test_waits() if waits else nullcontext():
            return join(thread, timeout_s)

    monkeypatch.setattr(TracingThread, "join", join_while_disturbed)
    with engine.running():
        yield engine
    with open(os.environ[HOSTILE], "a") as file:
        file.write(f"{json.dumps(engine.ran)}\n")
    assert engine.errors == []


@pytest.fixture
def prepare_live(attend_op, tmp_path, monkeypatch, hostile_engine):
    """Models prepared on one cache, with a compiler that takes no time; closed at the end."""
    monkeypatch.setattr(registry, "entry_points", lambda group: [Texts()])
    served = []

    def serve(model=None, ranks=None, replay=None, events=None, **settings):
        graphs = {"graph_mode": "PIECEWISE", "capture_sizes": (2, 4, 8)}
        config = Config(**DECODER, **graphs, compiler="texts", cache_dir=tmp_path / "cache")
        config = config.changed(**settings)
        model, stage = model or Model(), Stage()
        backend = strict_backend(**(replay or {}))
        with nullcontext() if hostile_engine is None else hostile_engine.turn:
            prepared = prepare(
                model, config, layers={"stage": stage}, backend=backend, ranks=ranks, events=events
            )
        served.append(prepared)
        return live_served(prepared, model, stage)

    yield serve
    for prepared in served:
        prepared.close()


@pytest.fixture
def before_code(monkeypatch):
    """`before_code(function)`: called in the thread before each piece is compiled."""

    def set_it(function):
        monkeypatch.setattr(registry, "entry_points", lambda group: [Texts(before=function)])

    return set_it


@pytest.fixture(scope="module")
def one_cache(tmp_path_factory):
    """Models of the module are prepared on one cache, where "texts" is a compiler: equal ones are
    traced once."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PIECEGRAPH_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patched.setattr(registry, "entry_points", lambda group: [Texts()])
        yield


@pytest.fixture
def serve_cold(prepare_live):
    """A model prepared with `bundle="serve"` on an empty cache."""

    def serve(model=None, **settings):
        return prepare_live(model, **{"bundle": "serve", **settings})

    return serve
