"""Metrics of prepared models for prometheus-client, which the extra `metrics` installs.

    REGISTRY.register(MetricsCollector(prepared))

Values are read when they are requested; they add no cost to a step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ... import __version__
from ...runtime.core.allowed_work import WorkKind
from ...runtime.core.records import GraphRecord, Record, Records, record_kinds
from ...runtime.core.report import background_facts, verified

if TYPE_CHECKING:
    from ... import PreparedModel

CACHE_EVENTS = (
    "hit",
    "miss",
    "published",
    "publish_failed",
    "quarantined",
    "evicted",
    "duplicate_work",
)
"""Counters of the cache that have a sample from the start."""

SAVED = "milliseconds_saved"

Samples = Mapping[Any, float]
"""Values by a tuple of the labels' values."""


def read_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """What `prepared` counted so far."""
    of_graphs = list(record_kinds(GraphRecord))
    others = [kind for kind in record_kinds() if kind not in of_graphs]
    yield from _step_metrics(prepared)
    yield from _record_metrics(prepared.records, of_graphs)
    yield from _counter_metrics(dict(prepared.records.counters))
    yield from _state_metrics(prepared)
    yield from _record_metrics(prepared.records, others)
    yield from _recording_metrics(prepared)
    yield from _startup_metrics(prepared.records)
    yield from _proof_metrics(prepared)


def _record_metrics(records: Records, kinds: Iterable[type[Record]]) -> Iterator[Metric]:
    """The metrics that records of these kinds state."""
    for kind in kinds:
        for metric in kind.metrics:
            family = _gauge if metric.first else _counter
            yield family(metric.name, metric.help, metric.labels, metric.samples(records.of(kind)))


def _step_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """Steps, their durations, and the rows that they ran."""
    rows, mode = prepared.usage.rows(), ("mode",)
    yield _counter(
        "piecegraph_steps",
        "Steps by runtime mode and by why it was taken.",
        ("mode", "reason"),
        {(row["mode"], row["reason"]): row["count"] for row in prepared.usage.reasons()},
    )
    yield _step_seconds(prepared.parts.log.step_log)
    run = _sum_by_label((row["mode"], row["count"] * row["num_tokens"]) for row in rows)
    yield _counter("piecegraph_rows", "Rows that were run, padding among them.", mode, run)
    padding = _sum_by_label((row["mode"], row["padded_tokens"]) for row in rows)
    yield _counter("piecegraph_padding_rows", "Rows of padding that were run.", mode, padding)


def _counter_metrics(counters: Mapping[str, int]) -> Iterator[Metric]:
    """Counts, bytes and seconds of the cache, then what was compiled, and what after seal()."""
    counts = _named(counters, "cache.")
    events = {
        (name,): count
        for (name,), count in counts.items()
        if "." not in name and not name.startswith("bytes_") and name != SAVED
    }
    events = {(event,): 0 for event in CACHE_EVENTS} | events
    yield _counter("piecegraph_cache_events", "What the cache did.", ("event",), events)
    hits, misses = (_named(counters, f"cache.{result}.") for result in ("hit", "miss"))
    yield _counter("piecegraph_cache_hits", "Hits of the cache, by layer.", ("layer",), hits)
    yield _counter(
        "piecegraph_cache_misses", "Misses of the cache, by reason.", ("reason",), misses
    )
    moved = {("read",): 0, ("written",): 0} | _named(counters, "cache.bytes_")
    yield _counter("piecegraph_cache_bytes", "Bytes read and written.", ("direction",), moved)
    saved = {(): counts.get((SAVED,), 0) / 1000}
    yield _counter("piecegraph_cache_saved_seconds", "Compile time that hits saved.", (), saved)
    compiles = {
        (name.removesuffix("_compiles"),): count
        for name, count in counters.items()
        if name.endswith("_compiles")
    }
    yield _counter("piecegraph_compiles", "Pieces compiled, by compiler.", ("compiler",), compiles)
    yield _counter(
        "piecegraph_after_seal",
        "Tracing, compiling and capturing after seal(), by kind.",
        ("kind",),
        {(kind.name.lower(),): 0 for kind in WorkKind} | _named(counters, "after_seal."),
    )


def _state_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """What is in use: versions and settings, and which code serves."""
    settings = {
        "version": __version__,
        "torch": version("torch"),
        "graph_mode": prepared.resolved.mode.value,
        "strategy": prepared.config.strategy.kind.value,
        "compiler": prepared.config.compiler,
    }
    yield _gauge(
        "piecegraph_info",
        "1, with versions and settings as labels.",
        tuple(settings),
        {tuple(settings.values()): 1},
    )
    is_verified = verified(prepared.records)
    yield _gauge(
        "piecegraph_bundle_verified",
        "1 if a new trace equals the bundle, 0 if it differs; absent if that is not known.",
        (),
        {(): int(is_verified)} if isinstance(is_verified, bool) else {},
    )
    background = background_facts(prepared.records)
    yield _gauge(
        "piecegraph_serving_uncompiled",
        "1 while the model is served uncompiled because of bundle='serve'.",
        (),
        {(): int(background is not None and background["state"] != "compiled")},
    )


def _proof_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """The state of each graph, while steps are proved."""
    labels, proofs, last = ("mode", "num_tokens", "graph_index"), {}, {}
    for row in prepared.parts.proof.graphs() or []:
        graph = tuple(str(row[name]) for name in labels)
        proofs[graph] = row["proved"]
        if row["last_step"] is not None:
            last[graph] = row["last_step"]
    yield _gauge("piecegraph_proofs", "Steps of each graph that were proved.", labels, proofs)
    help = "Steps of the model up to the last proof of each graph that has one."
    yield _gauge("piecegraph_last_proof_step", help, labels, last)


def _recording_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """The recordings that are held now."""
    recordings = [recording for _, recording in prepared.recordings()]
    yield _gauge("piecegraph_recordings", "Recordings that are held.", (), {(): len(recordings)})
    yield _gauge(
        "piecegraph_recording_bytes",
        "Bytes by which the recordings that are held grew the device's memory.",
        (),
        {(): sum(recording.bytes for recording in recordings)},
    )


def _startup_metrics(records: Records) -> Iterator[Metric]:
    phases = [("prepare", records.prepare_seconds), *records.phases]
    yield _gauge(
        "piecegraph_startup_seconds",
        "Seconds of each phase of the startup.",
        ("phase",),
        _sum_by_label(phases),
    )


def _step_seconds(log: Any) -> Metric:
    """Durations of steps by mode, while there is a log."""
    family = HistogramMetricFamily(
        "piecegraph_step_seconds",
        "Seconds of the host in a step, while PreparedModel.keep_steps is on.",
        labels=("mode",),
    )
    if log:
        bounds = [*(f"{bound:g}" for bound in log.bounds), "+Inf"]
        for mode, counts in log.counts.items():
            buckets = list(zip(bounds, map(float, accumulate(counts)), strict=True))
            family.add_metric([mode], buckets, log.seconds[mode])
    return family


def metrics_text(prepared: PreparedModel) -> str:
    """All metrics in Prometheus' text exposition format."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(prepared))
    return generate_latest(registry).decode()


class MetricsCollector(Collector):
    """A collector for a registry of prometheus-client; `labels` are added to every sample.

    Several models, by name, need one collector: their samples have a label `model`.
    """

    def __init__(
        self,
        prepared: PreparedModel | Mapping[str, PreparedModel],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        added = dict(labels or {})
        self._models: list[tuple[dict[str, str], PreparedModel]]
        if isinstance(prepared, Mapping):
            self._models = [({"model": name, **added}, model) for name, model in prepared.items()]
        else:
            self._models = [(added, prepared)]

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for labels, prepared in self._models:
            for metric in read_metrics(prepared):
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    family.add_sample(sample.name, {**labels, **sample.labels}, sample.value)
        yield from families.values()


class MultiprocessMetrics:
    """Metrics of a process whose registry nobody reads: gauges in prometheus-client's multiprocess
    mode, which another process serves from the folder in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self, prepared: PreparedModel, registry: Any = None) -> None:
        self._prepared, self._registry = prepared, registry
        self._gauges: dict[str, Gauge] = {}
        self._due = 0.0
        self.now = time.monotonic

    def update(self) -> None:
        """Write all values, at most once in a second."""
        now = self.now()
        if now < self._due:
            return
        self._due = now + 1
        for metric in read_metrics(self._prepared):
            for sample in metric.samples:
                if sample.name not in self._gauges:
                    self._gauges[sample.name] = Gauge(
                        sample.name,
                        metric.documentation,
                        list(sample.labels),
                        registry=self._registry,
                        multiprocess_mode="liveall",
                    )
                gauge = self._gauges[sample.name]
                (gauge.labels(**sample.labels) if sample.labels else gauge).set(sample.value)


def _filled(kind: Any, name: str, help: str, labels: Sequence[str], samples: Samples) -> Metric:
    family: Metric = kind(name, help, labels=labels)
    for values, value in samples.items():
        family.add_metric(values, value)  # type: ignore[attr-defined]
    return family


_counter, _gauge = partial(_filled, CounterMetricFamily), partial(_filled, GaugeMetricFamily)


def _named(counters: Mapping[str, int], prefix: str) -> dict[tuple[str, ...], float]:
    """Counters with this prefix, by the rest of their name."""
    return {
        (name.removeprefix(prefix),): count
        for name, count in sorted(counters.items())
        if name.startswith(prefix)
    }


def _sum_by_label(amounts: Iterable[tuple[str, float]]) -> Samples:
    """Amounts with the value of one label, added up."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    for label, amount in amounts:
        sums[(label,)] += amount
    return sums
