"""Compile a model through the main path and call it as the model would be called."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from piecegraph.cache import Cache
from piecegraph.compile.ir.compilation import CompileRequest
from piecegraph.compile.pipeline import compile_model
from piecegraph.compile.plan.compiled_model import CompiledModel
from piecegraph.config import Config, compile_config
from piecegraph.events import Events
from piecegraph.runtime.core.binding import binder, packer


@dataclass
class Compiled:
    """A compiled model that is called like the model it was made from."""

    compiled: CompiledModel
    signature: inspect.Signature
    events: Events

    def __post_init__(self):
        self._bind = binder(self.compiled.plan, self.signature)
        self._step = self.compiled.link()
        self._pack = packer(self.compiled.plan)

    @property
    def plan(self):
        return self.compiled.plan

    def __call__(self, *args, **kwargs):
        tensors, _ = self._bind(None, *args, **kwargs)
        with torch.no_grad():
            return self._pack(self._step(*tensors), tensors)


Compile = Callable[..., Compiled]


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory):
    """One cache directory for all tests that run Inductor."""
    return tmp_path_factory.mktemp("artifacts")


@pytest.fixture
def compiled(artifacts):
    """`compiled(model, splitting_ops=…, …)`: settings as in `Config`, eager pieces."""

    def compile_(model, *, examples=None, device="cpu", **settings):
        chosen = Config(compiler="eager").changed(**settings)
        config, folder = compile_config(chosen), chosen.codegen.dump_dir
        root = None if config.code.compiler == "eager" else artifacts
        events = Events()
        cache = Cache(root, events)
        target = torch.device(device)
        request = CompileRequest(model, config, cache, events, target, examples, dump_dir=folder)
        made = compile_model(request)
        return Compiled(made, inspect.signature(model.forward), events)

    yield compile_
    torch._dynamo.reset()
