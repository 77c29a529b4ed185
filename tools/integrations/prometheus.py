"""Metrics of prepared models: as text without any dependency, or collected by prometheus-client.

    REGISTRY.register(MetricsCollector(prepared))     # with the extra `metrics`

Values are read when they are asked for; a step pays nothing for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ...runtime.records import CaptureRecord, Records

if TYPE_CHECKING:
    from ... import PreparedModel

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
    yield _counter(
        "piecegraph_cache_events",
        "What the cache did.",
        _counts(counters, "event", prefix="cache."),
    )
    yield _counter(
        "piecegraph_compiles",
        "Pieces compiled, by compiler.",
        _counts(counters, "compiler", suffix="_compiles"),
    )
    yield _counter(
        "piecegraph_after_seal",
        "Tracing, compiling and capturing after seal(), by kind.",
        _counts(counters, "kind", prefix="after_seal."),
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


def metrics_text(prepared: PreparedModel) -> str:
    """All metrics in Prometheus' text exposition format."""
    return "".join(_text(metric) for metric in read_metrics(prepared))


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


def _counts(
    counters: Mapping[str, int], label: str, *, prefix: str = "", suffix: str = ""
) -> dict[Labels, float]:
    """Counters whose names begin and end so, by what stands between."""
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
    for labels, value in metric.samples.items():
        named = ",".join(f'{name}="{_escaped(label)}"' for name, label in labels)
        lines.append(f"{metric.sample_name}{f'{{{named}}}' if named else ''} {value:.10g}")
    return "\n".join(lines) + "\n"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
