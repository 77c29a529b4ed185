"""A small decoder served eagerly: what the library's prepared model does, without the library.

`EagerPrepared` pads to the next size, fills padding with garbage, runs the plain model and returns
the real rows. So the engine's side of a step is tested by itself.
"""

from __future__ import annotations

import io
import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from rich.console import Console

from piecegraph import (
    AttentionSupport,
    BatchDescriptor,
    Config,
    ForwardContext,
    RuntimeMode,
    forward_context,
)
from piecegraph.runtime.backends.replay.work_queue import QueuePoint
from piecegraph.tools.engine.block_manager import BlockManager
from piecegraph.tools.engine.decoder_config import DecoderConfig
from piecegraph.tools.engine.engine import ReferenceEngine
from piecegraph.tools.engine.kv_cache import allocate_layer_caches
from piecegraph.tools.engine.metadata import MetadataBuffers
from piecegraph.tools.engine.model import Decoder
from piecegraph.tools.engine.scheduler import Request, Scheduler
from piecegraph.tools.engine.serving_log import Clock
from piecegraph.tools.serve import run
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.requests import read_requests
from tests.text_compiler import use_text_compiler

SIZES = (1, 2, 4, 8)

ONE_LAYER = "layers=1,hidden=16,heads=2,kv_heads=1,intermediate=32,vocab=32"


class Started(NamedTuple):
    """The reference engine with the library, ready to serve its requests."""

    service: Any
    requests: list
    console: Console

    def serve(self):
        """The tokens of each request."""
        run.serve(self.service, self.requests, self.console)
        return [request.tokens for request in self.requests]


@contextmanager
def started(**options):
    """A small engine with these options of `piecegraph run`."""
    small = {
        "model": ONE_LAYER, "requests": 6, "length_scale": 0.1, "max_num_reqs": 3,
        "max_num_tokens": 12, "capture_sizes": "1,2,4,8", "backend": "eager", "no_cache": True,
        "verify": "none",
    }  # fmt: skip
    given = read_run_options(**small | options)
    requests, console = read_requests(given), Console(file=io.StringIO())
    with run.start_service(given, requests, [], console) as service:
        yield Started(service, requests, console)


LIBRARY_REPORT = json.loads(Path(__file__).with_name("library_report.json").read_text())


SUGGESTED = {
    "sizes": [8],
    "padding": 0.25,
    "steps_above": 2,
    "suggested": {"sizes": [8, 30], "padding": 0.2, "steps_above": 0},
}


def parts_of_nothing():
    """Parts that do nothing: a stand-in is not proved, and no memory is counted."""
    return SimpleNamespace(
        proof=SimpleNamespace(idle=lambda: False, prove_with=lambda keep, rebuild: None),
        strategies=SimpleNamespace(
            ledger=SimpleNamespace(own=lambda owner, tensors: None), idle=lambda budget_ms: 0
        ),
    )


@dataclass
class EagerPrepared:
    """Stands in for a prepared model with FULL decode graphs and pieces for all else."""

    model: Decoder
    layers: dict
    batches: list = field(default_factory=list)
    calls: list = field(default_factory=list)

    config = Config()
    dispatcher = SimpleNamespace(plan=SimpleNamespace(entries=()))
    parts: SimpleNamespace = field(default_factory=parts_of_nothing)

    def warm_up(self, metadata_for, tasks, skip=()):
        self.capture(metadata_for)
        for task in tasks:
            for shape in task.shapes:
                task.run(shape)

    def capture(self, metadata_for):
        self.calls.append("capture")
        for size in SIZES:
            for mode in (RuntimeMode.PIECEWISE, RuntimeMode.FULL):
                descriptor = BatchDescriptor(size)
                ids = torch.zeros(size, dtype=torch.int64)
                metadata = metadata_for(descriptor, mode)
                self.run(SimpleNamespace(descriptor=descriptor), ids, ids, metadata=metadata)

    def watch(self, name, tensor):
        """Addresses of a stand-in are not checked."""

    def seal(self):
        self.calls.append("seal")

    def close(self):
        self.calls.append("close")

    def dispatch(self, batch):
        self.batches.append(batch)
        padded = next((size for size in SIZES if size >= batch.num_tokens), None)
        if padded is None:
            mode = RuntimeMode.NONE
        else:
            mode = RuntimeMode.FULL if batch.is_decode else RuntimeMode.PIECEWISE
        descriptor = BatchDescriptor(num_tokens=padded or batch.num_tokens)
        return SimpleNamespace(mode=mode, descriptor=descriptor, reason="the next size")

    def copies_done(self):
        return QueuePoint(None)  # nothing is delayed

    def run(self, decision, input_ids, positions, *, metadata):
        missing = decision.descriptor.num_tokens - len(input_ids)
        padding = torch.full((missing,), 3)
        with forward_context(ForwardContext(self.layers, metadata)):
            hidden = self.model(torch.cat((input_ids, padding)), torch.cat((positions, padding)))
        assert hidden.isfinite().all()
        return hidden[: len(input_ids)]


@dataclass
class World:
    """Everything of one small engine, so that a test can look at all of it."""

    model: Decoder
    layers: dict
    prepared: EagerPrepared
    buffers: MetadataBuffers
    scheduler: Scheduler
    clock: Clock
    engine: ReferenceEngine

    def serve(self, requests):
        """The tokens of each request, when all are complete."""
        for _ in self.engine.serve(requests):
            pass
        return [request.tokens for request in requests]


@pytest.fixture(scope="session")
def small_config():
    """Settings of a model that takes x, (num_tokens, 4), as long as nothing else is given."""

    def make(**settings):
        return Config(
            inputs={"x": "float32[num_tokens, 4]"},
            max_num_tokens=8,
            max_num_reqs=8,
            attention={"support": AttentionSupport.ALWAYS},
            compiler="eager",
            cache=False,
        ).changed(**settings)

    return make


@pytest.fixture
def make_world():
    def make(*, num_blocks=40, block_size=4, max_num_tokens=12, max_num_reqs=4):
        config = DecoderConfig(2, 16, 4, 2, 24, 50, max_positions=64)
        model = Decoder(config, seed=1)
        layers = allocate_layer_caches(
            model.layer_names,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=2,
            head_dim=4,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )
        prepared = EagerPrepared(model, layers)
        buffers = MetadataBuffers(
            max_rows=max_num_tokens, max_blocks=10, device=torch.device("cpu")
        )
        scheduler = Scheduler(
            BlockManager(num_blocks, block_size),
            max_num_tokens=max_num_tokens,
            max_num_reqs=max_num_reqs,
        )
        clock = Clock()
        engine = ReferenceEngine(prepared, model.logits, scheduler, buffers, clock)
        return World(model, layers, prepared, buffers, scheduler, clock, engine)

    return make


@pytest.fixture
def make_requests():
    def make(*lengths, vocab=50, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return [
            Request(i, torch.randint(vocab, (prompt,), generator=generator).tolist(), generate)
            for i, (prompt, generate) in enumerate(lengths)
        ]

    return make


@pytest.fixture
def configured(monkeypatch):
    """`configured(**settings)`: the reference engine has these settings of the library."""

    def change(**settings):
        before = run.library_config
        config = lambda *given: before(*given).changed(**settings)  # noqa: E731
        monkeypatch.setattr(run, "library_config", config)

    return change


@pytest.fixture
def registered():
    """`registered(compiler)` gives the name by which a configuration asks for it."""
    from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

    names = []

    def register(compiler):
        names.append(f"of_a_test_{len(names)}")
        register_backend(compiler, name=names[-1])
        return names[-1]

    yield register
    for name in names:
        del _COMPILER_FNS[name]


@pytest.fixture
def text_compiler(monkeypatch, configured):
    """The reference engine has a compiler whose code is kept and takes no time."""
    use_text_compiler(monkeypatch)
    configured(compiler="text")


@pytest.fixture(scope="session")
def code_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("code")


@pytest.fixture
def traced_once(text_compiler, configured, code_folder):
    """Tests of one process share the code of equal models of the reference engine."""
    configured(cache=True, cache_dir=code_folder)


@pytest.fixture
def library(monkeypatch):
    """Replace `prepare`; returns the stand-ins it made, with the config they were given."""
    made = []

    def prepare(model, config, *, layers, events, ranks=None, factory=None):
        prepared = EagerPrepared(model, layers)
        prepared.config = config
        prepared.report = lambda: LIBRARY_REPORT
        made.append(prepared)
        return prepared

    monkeypatch.setattr(run, "prepare", prepare)
    monkeypatch.setattr(run, "suggested_sizes", lambda prepared: SUGGESTED)
    return made
