"""Fast starts: a compiler whose artifact of a piece is the piece's Python source.

It keeps artifacts as Inductor does, and what it loads computes what the piece computes; keys,
bundles and processes are tested with it.
"""

from __future__ import annotations

import math
import operator
import types
from dataclasses import dataclass

import torch

from piecegraph.cache import Cache, Key
from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.bundle.key_factors import trace_key
from piecegraph.compile.ir import registered_compilers as compilers
from piecegraph.compile.ir.compilation import CompileRequest
from piecegraph.compile.pipeline import compile_model
from piecegraph.compile.plan.compiled_model import CompiledModel
from piecegraph.config import BundleUse, Config, compile_config
from piecegraph.events import Events

from .models import X

CPU = torch.device("cpu")


def compile_text(graph, inputs, options):
    used = graph.graph.python_code("self").globals
    imports = [
        f"from {value.__module__} import {value.__name__} as {name}\n"
        for name, value in used.items()
        if isinstance(value, (types.FunctionType, types.BuiltinFunctionType))
        and not str(value.__module__).startswith("torch")
    ]
    blobs = {"code": "".join([*imports, graph.code]).encode()}
    return lambda: (load_texts([blobs])[0], blobs)


def load_texts(artifacts):
    return [_loaded(blobs["code"].decode()) for blobs in artifacts]


def _loaded(code):
    names = {
        "torch": torch,
        "operator": operator,
        "math": math,
        "device": torch.device,
        "inf": math.inf,
        "nan": math.nan,
    }
    exec(code, names)
    return lambda args: names["forward"](None, *args)


TEXT = Compiler("text", compile_text, load_texts, version="1")


class EntryPoint:
    name = "text"

    def load(self):
        return TEXT


def use_text_compiler(monkeypatch):
    """Make `compiler="text"` known, as an installed package would by an entry point."""
    monkeypatch.setattr(compilers, "entry_points", lambda group: [EntryPoint()])


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


def start(model, root, *, examples=None, exchange=None, **given):
    """Start `model` from the cache at `root`, by default with the text compiler and input `x`."""
    inputs = {} if examples is not None else {"inputs": X}
    settings = Config(**{"compiler": "text", "max_num_tokens": 64, **inputs, **given})
    config, events = compile_config(settings), Events()
    request = CompileRequest(
        model,
        config,
        Cache(root, events),
        events,
        CPU,
        examples,
        exchange,
        needs_bundle=settings.bundle is BundleUse.FORCE,
    )
    key = trace_key(model, config, CPU, examples)
    return Start(compile_model(request), events, key)
