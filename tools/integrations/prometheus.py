"""Metrics of prepared models: as text without any dependency, or collected by prometheus-client.

    REGISTRY.register(MetricsCollector(prepared))     # with the extra `metrics`

Values are read when they are requested; they add no cost to a step.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Literal

from ... import __version__
from ...runtime.records import CaptureRecord, Records
from ...runtime.report import background_facts
from ...runtime.step.step_log import BOUNDS, StepLog
from ...runtime.strategy.monitors import Kind

if TYPE_CHECKING:
    from ... import PreparedModel

Labels = tuple[tuple[str, str], ...]


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

SAVED = "cache.milliseconds_saved"


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: a counter's name is given without its `_total`."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: Mapping[Labels, float]

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def named_samples(self) -> Iterator[tuple[str, Labels, float]]:
        """Each sample with its name; those of a histogram have it as the label `sample`."""
        for labels, value in self.samples.items():
            if self.kind == "histogram":
                yield f"{self.name}_{dict(labels)['sample']}", labels[1:], value
            else:
                yield self.sample_name, labels, value


def read_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """What `prepared` counted so far."""
    rows = prepared.usage.rows()
    captures = prepared.records.of(CaptureRecord)
    recordings = prepared.recordings()
    counters = dict(prepared.records.counters)
    yield _counter(
        "piecegraph_steps",
        "Steps by runtime mode and by why it was taken.",
        {
            (("mode", row["mode"]), ("reason", row["reason"])): row["count"]
            for row in prepared.usage.reasons()
        },
    )
    yield Metric(
        "piecegraph_step_seconds",
        "histogram",
        "Seconds of the host in a step, while PreparedModel.keep_steps is on.",
        _histogram(prepared.step_log),
    )
    yield _counter(
        "piecegraph_rows",
        "Rows that were run, padding among them.",
        _sums((row["mode"], row["count"] * row["num_tokens"]) for row in rows),
    )
    yield _counter(
        "piecegraph_padding_rows",
        "Rows of padding that were run.",
        _sums((row["mode"], row["padded_tokens"]) for row in rows),
    )
    yield _counter(
        "piecegraph_captures",
        "Graphs captured.",
        _sums((capture.mode, 1) for capture in captures),
    )
    yield _counter(
        "piecegraph_capture_seconds",
        "Seconds spent capturing.",
        _sums((capture.mode, capture.ms / 1000) for capture in captures),
    )
    yield from _cache_metrics(counters)
    yield _counter(
        "piecegraph_compiles",
        "Pieces compiled, by compiler.",
        _counts(counters, "compiler", suffix="_compiles"),
    )
    yield _counter(
        "piecegraph_after_seal",
        "Tracing, compiling and capturing after seal(), by kind.",
        {(("kind", kind.name.lower()),): 0 for kind in Kind}
        | _counts(counters, "kind", prefix="after_seal."),
    )
    yield Metric(
        "piecegraph_info",
        "gauge",
        "1, with versions and settings as labels.",
        {
            (
                ("version", __version__),
                ("torch", version("torch")),
                ("graph_mode", prepared.resolved.mode.value),
                ("strategy", prepared.config.strategy.value),
                ("compiler", prepared.config.compiler),
            ): 1
        },
    )
    behind = background_facts(prepared.records)
    yield Metric(
        "piecegraph_serving_uncompiled",
        "gauge",
        "1 while the model is served uncompiled because of cold='serve'.",
        {(): int(behind is not None and behind["state"] != "compiled")},
    )
    yield _counter(
        "piecegraph_background_failures",
        "Children that did not compile the model.",
        {(): len(behind["failures"]) if behind else 0},
    )
    yield Metric(
        "piecegraph_switch_seconds",
        "gauge",
        "Seconds from the start until compiled code served.",
        {(): behind["switch"]["seconds"]} if behind and behind["switch"] else {},
    )
    yield Metric(
        "piecegraph_recordings", "gauge", "Recordings that are held.", {(): len(recordings)}
    )
    yield Metric(
        "piecegraph_recording_bytes",
        "gauge",
        "Bytes by which the recordings that are held grew the device's memory.",
        {(): sum(recording.bytes for _, recording in recordings)},
    )
    yield Metric(
        "piecegraph_startup_seconds",
        "gauge",
        "Seconds of each phase of the startup.",
        _phases(prepared.records),
    )


def _cache_metrics(counters: Mapping[str, int]) -> Iterator[Metric]:
    """Counts, bytes and seconds of the cache, each in a family of its own."""
    events = dict.fromkeys(CACHE_EVENTS, 0.0)
    by: dict[str, dict[Labels, float]] = {"hit": {}, "miss": {}, "bytes": {}}
    by["bytes"] = {(("direction", each),): 0.0 for each in ("read", "written")}
    for name, count in sorted(counters.items()):
        if not name.startswith("cache.") or name == SAVED:
            continue
        name = name.removeprefix("cache.")
        kind, _, detail = name.partition(".")
        if kind in ("hit", "miss") and detail:
            by[kind][("layer" if kind == "hit" else "reason", detail),] = count
        elif name.startswith("bytes_"):
            by["bytes"][("direction", name.removeprefix("bytes_")),] = count
        else:
            events[name] = count
    yield _counter(
        "piecegraph_cache_events",
        "What the cache did.",
        {(("event", event),): count for event, count in events.items()},
    )
    yield _counter("piecegraph_cache_hits", "Hits of the cache, by layer.", by["hit"])
    yield _counter("piecegraph_cache_misses", "Misses of the cache, by reason.", by["miss"])
    yield _counter("piecegraph_cache_bytes", "Bytes read and written.", by["bytes"])
    yield _counter(
        "piecegraph_cache_saved_seconds",
        "Compile time that hits saved.",
        {(): counters.get(SAVED, 0) / 1000},
    )


def metrics_text(prepared: PreparedModel) -> str:
    """All metrics in Prometheus' text exposition format."""
    return "".join(_text(metric) for metric in read_metrics(prepared))


class MetricsCollector:
    """A collector for a registry of prometheus-client; `labels` are added to every sample.

    Several models, by name, need one collector: their samples have a label `model`.
    """

    def __init__(
        self,
        prepared: PreparedModel | Mapping[str, PreparedModel],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        own = tuple((labels or {}).items())
        self._models: list[tuple[Labels, PreparedModel]]
        if isinstance(prepared, Mapping):
            self._models = [((("model", name), *own), each) for name, each in prepared.items()]
        else:
            self._models = [(own, prepared)]

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        families = {
            "counter": CounterMetricFamily,
            "gauge": GaugeMetricFamily,
            "histogram": HistogramMetricFamily,
        }
        collected: dict[str, Any] = {}
        for own, prepared in self._models:
            for metric in read_metrics(prepared):
                made: Any = families[metric.kind](metric.name, metric.help)
                family = collected.setdefault(metric.name, made)
                for name, labels, value in metric.named_samples():
                    family.add_sample(name, dict(own + labels), value)
        yield from collected.values()


class MultiprocessMetrics:
    """Metrics of a process whose registry nobody reads: gauges in prometheus-client's multiprocess
    mode, which another process serves from the folder in PROMETHEUS_MULTIPROC_DIR."""

    def __init__(self, prepared: PreparedModel, registry: Any = None) -> None:
        self._prepared, self._registry = prepared, registry
        self._gauges: dict[str, Any] = {}
        self._due = 0.0
        self.now = time.monotonic

    def update(self) -> None:
        """Write all values, at most once in a second."""
        now = self.now()
        if now < self._due:
            return
        self._due = now + 1
        for metric in read_metrics(self._prepared):
            for name, labels, value in metric.named_samples():
                gauge = self._gauges.get(name) or self._gauge(name, metric.help, labels)
                (gauge.labels(**dict(labels)) if labels else gauge).set(value)

    def _gauge(self, name: str, help: str, labels: Labels) -> Any:
        from prometheus_client import Gauge

        names = [label for label, _ in labels]
        gauge = Gauge(name, help, names, registry=self._registry, multiprocess_mode="liveall")
        return self._gauges.setdefault(name, gauge)


def _counter(name: str, help: str, samples: Mapping[Labels, float]) -> Metric:
    return Metric(name, "counter", help, samples)


def _histogram(log: StepLog | None) -> dict[Labels, float]:
    """Cumulative counts of step durations by mode, their sums and counts."""
    samples: dict[Labels, float] = {}
    if log is None:
        return samples
    for mode, counts in log.counts.items():
        total = 0
        for bound, count in zip((*BOUNDS, math.inf), counts, strict=True):
            total += count
            le = "+Inf" if bound == math.inf else f"{bound:g}"
            samples[("sample", "bucket"), ("mode", mode), ("le", le)] = total
        samples[("sample", "sum"), ("mode", mode)] = log.seconds[mode]
        samples[("sample", "count"), ("mode", mode)] = total
    return samples


def _counts(
    counters: Mapping[str, int], label: str, *, prefix: str = "", suffix: str = ""
) -> dict[Labels, float]:
    """Counters with this prefix and suffix, by the part of the name in between."""
    return {
        ((label, name.removeprefix(prefix).removesuffix(suffix)),): count
        for name, count in sorted(counters.items())
        if name.startswith(prefix) and name.endswith(suffix)
    }


def _sums(amounts: Iterator[tuple[str, float]]) -> dict[Labels, float]:
    """Amounts added up by runtime mode."""
    sums: Counter[Labels] = Counter()
    for mode, amount in amounts:
        sums[(("mode", mode),)] += amount  # type: ignore[assignment]
    return dict(sums)


def _phases(records: Records) -> dict[Labels, float]:
    """Seconds by phase of the startup, and of `prepare` as a whole."""
    sums: dict[str, float] = {"prepare": records.prepare_seconds}
    for span in records.phases:
        sums[span.name] = sums.get(span.name, 0.0) + span.seconds
    return {(("phase", name),): seconds for name, seconds in sums.items()}


def _text(metric: Metric) -> str:
    lines = [f"# HELP {metric.sample_name} {metric.help}"]
    lines.append(f"# TYPE {metric.sample_name} {metric.kind}")
    for name, labels, value in metric.named_samples():
        named = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels)
        lines.append(f"{name}{f'{{{named}}}' if named else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
