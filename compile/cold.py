"""A start without a bundle: cut the model, compile what no earlier process did, keep all of it.

Only a cold start imports this, and with it sympy, networkx and all that tracing needs.
"""

from __future__ import annotations

import logging

from ..cache import Key
from .backends.jobs import compile_pieces
from .backends.registry import Compiler
from .bundle.bundle import Bundle, store_bundle
from .bundle.provenance import provenance
from .ir.readable import readable
from .ir.request import Task
from .lower.compiled_model import CompiledModel, bind
from .lower.cut import cut_model
from .lower.dependencies import picture, piece_graph
from .lower.dump import dump_plan
from .lower.report_plan import tell_plan


def cold_start(task: Task, compiler: Compiler, key: Key | None) -> CompiledModel:
    cut = cut_model(task)
    compiled = compile_pieces(task, cut, compiler)
    plan = cut.plan(compiled.spans)
    graph = piece_graph(plan)
    task.events.detail("piece_graph", lambda: picture(graph))
    tell_plan(plan, task.events)
    if (directory := task.config.dump_dir) is not None:
        dump_plan(plan, directory)
        (directory / "graph.py").write_text(readable(cut.trace.graph))
    artifacts = [made.blobs for made in compiled.made]
    if key is not None and all(artifacts):
        with task.events.span("cache.store", level=logging.INFO):
            bundle = Bundle(plan, provenance(cut.trace, cut.config), artifacts)
            store_bundle(task.cache, key, bundle, task.model, task.device)
    elif key is not None:
        reason = "the compiler's own caches are off, so it gives no artifacts"
        task.events.emit("bundle.not_kept", level=logging.WARNING, reason=reason)
    return bind(plan, [made.fn for made in compiled.made], task.model, from_bundle=False)
