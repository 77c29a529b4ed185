"""Fast starts, with the compiler of `tests.text_compiler`: keys, bundles and processes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from piecegraph.cache import Cache, Key
from piecegraph.compile.bundle.key_factors import trace_key
from piecegraph.compile.ir.compilation import CompileRequest
from piecegraph.compile.pipeline import compile_model
from piecegraph.compile.plan.compiled_model import CompiledModel
from piecegraph.config import BundleUse, Config, compile_config
from piecegraph.events import Events

from .models import X

CPU = torch.device("cpu")


@dataclass
class Start:
    """What one start did."""

    compiled: CompiledModel
    events: Events
    key: Key

    @property
    def hit(self):
        return self.compiled.from_bundle

    @property
    def reason(self):
        """Why there was no bundle to use, from the first event."""
        facts = self.events.named("bundle")[0].facts
        return " ".join(str(facts.get(name, "")) for name in ("reason", "detail"))

    def __call__(self, *inputs):
        with torch.no_grad():
            return self.compiled.link()(*inputs)[0]


def request_of(model, root=None, *, examples=None, exchange=None, **given):
    """A start of `model` on the cache at `root`, by default with the text compiler and `x`."""
    inputs = {} if examples is not None else {"inputs": X}
    settings = Config(**{"compiler": "text", "max_num_tokens": 64, **inputs, **given})
    config, events = compile_config(settings), Events()
    force = settings.bundle is BundleUse.FORCE
    cache = Cache(root, events)
    return CompileRequest(model, config, cache, events, CPU, examples, exchange, needs_bundle=force)


def start(model, root, **given):
    """What the start of `request_of` does."""
    request = request_of(model, root, **given)
    key = trace_key(model, request.config, CPU, request.examples)
    return Start(compile_model(request), request.events, key)
