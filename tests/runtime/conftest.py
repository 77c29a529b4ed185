"""A rig per backend: the same tests run on the replay backend and, if there is one, on a GPU.

Also makes prepared models without `prepare`, so that one trace serves many tests.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from piecegraph import Batch, Config, Dispatcher, Events, PreparedModel, prepare
from piecegraph.cache import Cache
from piecegraph.compile.ir.compilation import CompileRequest
from piecegraph.compile.pipeline import compile_model
from piecegraph.config import compile_config, dispatch_plan
from piecegraph.dispatch import resolve_mode
from piecegraph.runtime.assemble import Beginning, assemble
from piecegraph.runtime.backends.protocol import GraphBackend
from piecegraph.runtime.backends.registry import choose_backend
from piecegraph.runtime.backends.replay.backend import ReplayBackend, ReplayOptions
from piecegraph.runtime.capture.recorder import record
from piecegraph.runtime.capture.session import capture_session
from piecegraph.runtime.core.environment import Environment
from piecegraph.runtime.core.records import Records
from piecegraph.runtime.core_model import CoreModel
from piecegraph.runtime.forward_context import ForwardContext
from piecegraph.runtime.setup.model_policy import Policy

from .fake_device import FakeBackend


@dataclass
class Rig:
    """A backend with one pool; `record` opens a session for one recording."""

    backend: GraphBackend
    device: torch.device
    events: Events
    pool: Any

    def record(self, fn, *inputs, breaks=True):
        with capture_session(self.backend, self.pool, self.events, prepare=False) as session:
            return record(fn, inputs, session, name="test", breaks=breaks)

    def rand(self, *shape):
        return torch.rand(shape, device=self.device)


def small_config(most=8, **settings):
    """A small model of an input `x` in FULL graphs at any batch, not compiled and not kept."""
    return Config(
        max_num_tokens=most,
        max_num_reqs=most,
        **{
            "inputs": {"x": "float32[num_tokens, 4]"},
            "graph_mode": "FULL",
            "attention": {"support": "ALWAYS"},
            "compiler": "eager",
            "cache": False,
            **settings,
        },
    )


class Computes(nn.Module):
    """A model whose forward is the function `fn` of its input."""

    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def strict_backend(**options):
    """A replay backend with all checks on."""
    loud = {"poison_before_replay": True, "fail_on_moved_inputs": True}
    return ReplayBackend(ReplayOptions(**{**loud, **options}))


def captured(model, most=8, backend=None, layers=None, metadata_for=None, **settings):
    """The model with its graphs, on a strict backend unless another is given."""
    config, backend = small_config(most, **settings), backend or strict_backend()
    prepared = prepare(model, config, backend=backend, layers=layers)
    prepared.capture(metadata_for)
    return prepared


def right_step(prepared, model, *inputs, batch=None):
    """One step, whose results must be the model's; the name of its mode."""
    size = len(inputs[0])
    decision = prepared.dispatch(batch or Batch(size, size))
    torch.testing.assert_close(prepared.run(decision, *inputs), model(*inputs))
    return decision.mode.name


def prepare_on_replay(compiled, config, mode, sizes, layers, options, input_buffers=None):
    """What `prepare` returns for a compiled model, on a strict backend."""
    config = config.changed(capture_sizes=tuple(sizes))
    dispatcher = Dispatcher(dispatch_plan(mode, config))
    cache = Cache(None, Events())
    environment = Environment(
        config, strict_backend(**options), torch.device("cpu"), cache, Records()
    )
    core = CoreModel(
        environment,
        compiled,
        Policy(resolve_mode(mode, support={}, pieces=True), dispatcher),
        ForwardContext(layers),
        input_buffers or {},
        None,
    )
    return assemble(core, Beginning(compiled))


def compiled_by(config, model):
    device, cache = torch.device("cpu"), Cache(None, Events())
    return compile_model(CompileRequest(model, compile_config(config), cache, Events(), device))


def compile_once(model, **settings):
    """A model that is traced but not compiled; tests bind and prepare it as often as they like."""
    config = Config(compiler="eager", cache=False, **settings)
    return config, compiled_by(config, model)


@dataclass
class Served:
    """A prepared model of one input `x` (num_tokens, 4), and the plain model as a function."""

    prepared: PreparedModel
    expected: Callable[[torch.Tensor], torch.Tensor]

    def capture(self, metadata_for=None):
        self.prepared.capture(metadata_for)
        return self

    def check(self, batch):
        """One step of random rows; the result must equal the plain model's bit for bit.

        Returns mode and padded size.
        """
        x = torch.randn(batch.num_tokens, 4)
        decision = self.prepared.dispatch(batch)
        assert torch.equal(self.prepared.run(decision, x), self.expected(x))
        return f"{decision.mode.name} {decision.descriptor.num_tokens}"

    def decode(self, n):
        return self.check(Batch(n, n, is_decode=True, query_len=1))

    def mixed(self, n):
        return self.check(Batch(n, 1))

    @property
    def backend(self):
        return self.prepared.backend

    @property
    def captures(self):
        """Captures in the order in which they were made."""
        return self.told("capture")

    def told(self, event):
        """Mode and padded size of each event of this name."""
        facts = [each.facts for each in self.prepared.events.named(event)]
        return [f"{each['mode']} {each['num_tokens']}" for each in facts]

    def captured(self):
        return [graph_index for graph_index, _ in self.prepared.recordings()]

    @property
    def used(self):
        """Bytes of graph memory."""
        return int(self.prepared.backend.memory().used)


def found_by(ownership):
    """The tensors from outside that a capture holds."""
    return ownership.found()


def tensors_alive():
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


@pytest.fixture(scope="session")
def temporary_op():
    """`temporary_op("ns::op", "(Tensor x, …) -> ()", kernel)` defines an op for this session."""
    libraries = []

    def define(name, schema, kernel, fake=lambda *args: None):
        namespace, op = name.split("::")
        library = torch.library.Library(namespace, "FRAGMENT")
        libraries.append(library)
        library.define(op + schema)
        library.impl(op, kernel, "CPU")
        torch.library.register_fake(name, fake, lib=library)
        return name

    yield define
    for library in libraries:
        library._destroy()


def make_rig(backend, device):
    return Rig(backend, torch.device(device), Events(), backend.new_pool())


@pytest.fixture(params=["replay", "fake", pytest.param("cuda", marks=pytest.mark.gpu)])
def rig(request):
    """The replay backend has all checks on."""
    with torch.no_grad():
        if request.param == "replay":
            yield make_rig(strict_backend(), "cpu")
        elif request.param == "fake":
            yield make_rig(FakeBackend(), "cpu")
        else:
            yield make_rig(choose_backend("cuda", torch.device("cuda")), "cuda")


@pytest.fixture
def make_replay_rig():
    """A rig on the replay backend with the given `ReplayOptions`."""
    with torch.no_grad():
        yield lambda **options: make_rig(ReplayBackend(ReplayOptions(**options)), "cpu")
