"""Metrics of prepared models: as text without any dependency, or collected by prometheus-client.

    REGISTRY.register(MetricsCollector(prepared))     # with the extra `metrics`

Values are read when they are asked for; a step pays nothing for them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .. import PreparedModel

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Metric:
    """One family: a counter's name is given without its `_total`."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    samples: Mapping[Labels, float]

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def read_metrics(prepared: PreparedModel) -> Iterator[Metric]:
    """What `prepared` counted so far."""
    rows = prepared.usage.rows()
    captures = [event.facts for event in prepared.events.named("capture")]
    recordings = prepared.recordings()
    counters = dict(prepared.events.counters)
    yield _counter(
        "piecegraph_steps",
        "Steps by runtime mode and by why it was taken.",
        {
            (("mode", row["mode"]), ("reason", row["reason"])): row["count"]
            for row in prepared.usage.reasons()
        },
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
        _sums((capture["mode"], 1) for capture in captures),
    )
    yield _counter(
        "piecegraph_capture_seconds",
        "Seconds spent capturing.",
        _sums((capture["mode"], capture["ms"] / 1000) for capture in captures),
    )
    yield _counter(
        "piecegraph_cache_events",
        "What the cache did.",
        {
            (("event", name.removeprefix("cache.")),): count
            for name, count in sorted(counters.items())
            if name.startswith("cache.")
        },
    )
    yield _counter(
        "piecegraph_compiles",
        "Pieces compiled, by compiler.",
        {
            (("compiler", name.removesuffix("_compiles")),): count
            for name, count in sorted(counters.items())
            if name.endswith("_compiles")
        },
    )
    yield _counter(
        "piecegraph_after_seal",
        "Tracing, compiling and capturing after seal(), by kind.",
        {
            (("kind", name.removeprefix("after_seal.")),): count
            for name, count in sorted(counters.items())
            if name.startswith("after_seal.")
        },
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
        {(("phase", phase),): seconds for phase, seconds in _phases(prepared).items()},
    )


def metrics_text(prepared: PreparedModel) -> str:
    """All metrics in Prometheus' text exposition format."""
    return "".join(_text(metric) for metric in read_metrics(prepared))


def write_metrics(prepared: PreparedModel, path: Path) -> None:
    """Write `metrics_text` to a file, or to standard output if `path` is `-`."""
    text = metrics_text(prepared)
    if path == Path("-"):
        sys.stdout.write(text)
    else:
        path.write_text(text)


class MetricsCollector:
    """A collector for a registry of prometheus-client; `labels` are added to every sample."""

    def __init__(self, prepared: PreparedModel, labels: Mapping[str, str] | None = None) -> None:
        self._prepared = prepared
        self._labels = tuple((labels or {}).items())

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
        for metric in read_metrics(self._prepared):
            family: Any = families[metric.kind](metric.name, metric.help)
            for labels, value in metric.samples.items():
                family.add_sample(metric.sample_name, dict(self._labels + labels), value)
            yield family


def _counter(name: str, help: str, samples: Mapping[Labels, float]) -> Metric:
    return Metric(name, "counter", help, samples)


def _sums(amounts: Iterator[tuple[str, float]]) -> dict[Labels, float]:
    """Amounts added up by runtime mode."""
    sums: Counter[Labels] = Counter()
    for mode, amount in amounts:
        sums[(("mode", mode),)] += amount  # type: ignore[assignment]
    return dict(sums)


def _phases(prepared: PreparedModel) -> dict[str, float]:
    return {
        span.name: span.seconds
        for span in prepared.events.spans
        if span.depth == 0 or (span.depth == 1 and not span.name.startswith("capture."))
    }


def _text(metric: Metric) -> str:
    lines = [f"# HELP {metric.sample_name} {metric.help}"]
    lines.append(f"# TYPE {metric.sample_name} {metric.kind}")
    for labels, value in metric.samples.items():
        named = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels)
        lines.append(f"{metric.sample_name}{f'{{{named}}}' if named else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
