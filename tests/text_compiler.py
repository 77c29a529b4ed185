"""A compiler that takes no time: its artifact of a piece is the piece's Python source.

It keeps artifacts as Inductor does, and what it loads computes what the piece computes. Nothing is
registered here: tests of several folders import it.
"""

import math
import operator
import types

import torch

from piecegraph.compile.backends.registry import Compiler
from piecegraph.compile.ir import registered_compilers as compilers


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
