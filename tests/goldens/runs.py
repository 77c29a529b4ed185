"""Report and metrics of a dozen short runs of a small model.

Times, paths and numbers of bytes that depend on the machine are replaced by their kind.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from piecegraph import Batch, Config, PreparedModel, prepare
from piecegraph.tools.integrations.prometheus import read_metrics

from ..compile.models import MIX, Stack, X

SETTINGS: dict[str, Any] = {
    "max_num_tokens": 16,
    "max_num_reqs": 8,
    "capture_sizes": (2, 4, 8),
    "inputs": X,
    "splitting_ops": MIX,
    "attention": {"support": "ALWAYS"},
    "compiler": "eager",
    "cache": False,
}
BATCHES = (
    *(Batch(n, n, is_decode=True, query_len=1) for n in (1, 2, 3, 8, 3)),
    *(Batch(n, 1) for n in (1, 3, 7, 8, 16)),
)
BESIDE = ("piecegraph-background", "piecegraph-verification")
"""Threads that end before a step or a report that depends on them."""


def prepared_model(model: nn.Module | None = None, **settings: Any) -> PreparedModel:
    """The model of the runs; its compiler takes no time, and keeps nothing unless it is `text`."""
    torch._dynamo.reset()
    ranks = settings.pop("ranks", None)
    model = Stack(2) if model is None else model
    return prepare(model, Config(**{**SETTINGS, **settings}), ranks=ranks)


def replay_options(prepared: PreparedModel, **options: Any) -> None:
    """Change `ReplayOptions` of the model's backend, before it captures."""
    backend: Any = prepared.backend
    backend.options = replace(backend.options, **options)


def serve(prepared: PreparedModel, batches: tuple[Batch, ...] = BATCHES) -> None:
    for batch in batches:
        prepared(torch.ones(batch.num_tokens, 8), batch=batch)


def wait_for_threads() -> None:
    """Until what works beside the steps has ended in this process."""
    for thread in threading.enumerate():
        if thread.name in BESIDE:
            thread.join()


def served(**settings: Any) -> PreparedModel:
    prepared = prepared_model(**settings)
    prepared.capture()
    serve(prepared)
    return prepared


def cached(folder: Path, **settings: Any) -> dict[str, Any]:
    """Settings of a model whose code is kept in `folder`."""
    return {"compiler": "text", "cache": True, "cache_dir": folder, **settings}


def evicting(folder: Path, **settings: Any) -> PreparedModel:
    """After startup there is room for one graph, and two sizes want one."""
    strategy = {"kind": "lazy", "max_bytes": 3000}
    prepared = prepared_model(graph_mode="PIECEWISE", strategy=strategy, **settings)
    replay_options(prepared, graph_bytes=1000)
    prepared.capture()
    for size, steps in ((2, 8), (4, 16)):  # the first graph becomes worth less than the second
        serve(prepared, (Batch(size, 1),) * steps)
    return prepared


def warm(folder: Path) -> PreparedModel:
    """A start from the bundle of another, verified after its steps."""
    served(**cached(folder, graph_mode="PIECEWISE")).close()
    prepared = served(**cached(folder, graph_mode="PIECEWISE"))
    prepared.parts.starts.wait_until_verified()
    serve(prepared)
    return prepared


def uncompiled_at_first(folder: Path) -> PreparedModel:
    """Steps of `bundle="serve"` until compiled code serves, and after that."""
    prepared = prepared_model(**cached(folder, graph_mode="PIECEWISE", bundle="serve"))
    prepared.capture()
    wait_for_threads()
    serve(prepared)
    return prepared


def warmed_up(folder: Path) -> PreparedModel:
    """A plan of memory, a limit that some graphs exceed, and a warm-up; then sealed."""
    prepared = prepared_model(graph_mode="FULL", steps={"memory_limit": 9000})
    prepared.parts.strategies.memory_plan()
    prepared.warm_up()
    prepared.seal()
    serve(prepared)
    return prepared


RUNS: dict[str, Callable[[Path], PreparedModel]] = {
    "NONE": lambda folder: served(graph_mode="NONE", capture_sizes=None),
    "PIECEWISE": lambda folder: served(graph_mode="PIECEWISE"),
    "FULL": lambda folder: served(graph_mode="FULL"),
    "FULL_DECODE_ONLY": lambda folder: served(graph_mode="FULL_DECODE_ONLY"),
    "FULL_AND_PIECEWISE": lambda folder: served(graph_mode="FULL_AND_PIECEWISE"),
    "resolved": lambda folder: served(graph_mode="FULL_AND_PIECEWISE", attention={}),
    "delayed": lambda folder: served(graph_mode="FULL_AND_PIECEWISE", strategy="delayed"),
    "lazy": evicting,
    "cold start": lambda folder: served(**cached(folder, graph_mode="PIECEWISE")),
    "warm start": warm,
    "bundle=serve": uncompiled_at_first,
    "shadow": lambda folder: served(graph_mode="FULL", shadow={"every": 2, "share": 1.0}),
    "compile=False": lambda folder: served(graph_mode="FULL_AND_PIECEWISE", compile=False),
    "warm-up under a limit": warmed_up,
}


def reports() -> dict[str, Any]:
    """Report and metrics of each run by its name, and the help of all metrics."""
    results = {}
    for name, run in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            prepared = run(Path(folder))
            results[name] = report_and_metrics(prepared)
            metrics = {
                each.name: f"{each.type}: {each.documentation}" for each in read_metrics(prepared)
            }
            prepared.close()
    return {"help of metrics": metrics, **results}


def report_and_metrics(prepared: PreparedModel) -> dict[str, Any]:
    return {"report": _normalized(prepared.report()), "metrics": _metrics(prepared)}


TIMES = re.compile(r"(?:^|_)(?:seconds|ms|share)$")
OF_THE_MACHINE = {
    *("free_bytes", "bytes_read", "bytes_written", "cache.bytes_read", "cache.bytes_written"),
    *("version", "torch"),
}
ABSENT_AT_TIMES = {"cache.milliseconds_saved"}
"""Counters that are there unless they are zero, which depends on the time that something took."""


def _normalized(value: Any, name: str = "") -> Any:
    """Without what differs between machines and starts; `name` is the key of the value."""
    if isinstance(value, dict):
        kept = [item for item in value.items() if item[0] not in ABSENT_AT_TIMES]
        return {str(key): _normalized(each, str(key)) for key, each in kept}
    if isinstance(value, list | tuple):
        return [_normalized(each, name) for each in value]
    if isinstance(value, int | float) and TIMES.search(name):
        return "TIME"
    if name in OF_THE_MACHINE and value is not None:
        return name.upper()
    return normalized_text(value) if isinstance(value, str) else value


PATTERNS = (
    (re.compile(re.escape(str(Path(__file__).parents[2])) + r"/?"), ""),
    (re.compile(r"(?:/[\w.+-]+)+/(?:site-packages|python3\.\d+)/"), "PYTHON/"),
    (re.compile(re.escape(tempfile.gettempdir()) + r"(?:/[\w.+-]+)+(?=/)"), "FOLDER"),
    (re.compile(r"\b0x[0-9a-f]+"), "ADDRESS"),
)


def normalized_text(text: str) -> str:
    for pattern, kind in PATTERNS:
        text = pattern.sub(kind, text)
    return text


def _metrics(prepared: PreparedModel) -> dict[str, Any]:
    """Each sample by its name and labels."""
    samples = {}
    for metric in read_metrics(prepared):
        for sample in metric.samples:
            labels = ", ".join(
                f"{label}={_normalized(value, label)}" for label, value in sample.labels.items()
            )
            is_time = "seconds" in sample.name
            bytes_moved = sample.name == "piecegraph_cache_bytes_total" and sample.value
            value = "TIME" if is_time else "BYTES" if bytes_moved else sample.value
            samples[f"{sample.name}{{{labels}}}"] = value
    return samples
