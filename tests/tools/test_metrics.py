"""Metrics: the same numbers in families of prometheus-client, as text, and in the report."""

from collections import Counter
from contextlib import closing
from functools import partial
from importlib.metadata import version

import pytest
import torch
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

import piecegraph
from piecegraph import Batch, prepare
from piecegraph.runtime.core.records import Stale, Verified
from piecegraph.tools.integrations.prometheus import (
    MetricsCollector,
    MultiprocessMetrics,
    metrics_text,
    read_metrics,
)

pytestmark = pytest.mark.compile


class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2


def served(config):
    """Prepared, captured by its strategy, sealed, and after five steps."""
    prepared = prepare(Model(), config)
    prepared.capture()
    prepared.seal()
    for size in (3, 4, 4, 6, 12):
        prepared(torch.ones(size, 4), batch=Batch(size, size))
    return prepared


@pytest.fixture(scope="module")
def config(small_config):
    limits = {"max_num_tokens": 16, "max_num_reqs": 16, "capture_sizes": (4, 8)}
    return partial(small_config, graph_mode="FULL", **limits)


@pytest.fixture(scope="module")
def prepared(config):
    with closing(served(config())) as prepared:
        yield prepared


@pytest.fixture
def own(config):
    """For a test that changes what is counted."""
    with closing(served(config(strategy="lazy"))) as prepared:
        yield prepared


def samples_of(families):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def samples(prepared):
    return samples_of(read_metrics(prepared))


def test_steps_rows_and_padding_are_counted(prepared):
    found = samples(prepared)
    assert found["piecegraph_steps_total", "FULL", "exact"] == 2
    assert found["piecegraph_steps_total", "FULL", "padded"] == 2
    assert found["piecegraph_steps_total", "NONE", "above largest size"] == 1
    assert found["piecegraph_rows_total", "FULL"] == 4 + 4 + 4 + 8
    assert found["piecegraph_padding_rows_total", "FULL"] == 1 + 2
    assert found["piecegraph_rows_total", "NONE"] == 12


def test_gauges_of_a_process_that_another_one_serves(own):
    registry = CollectorRegistry()
    metrics = MultiprocessMetrics(own, registry)
    metrics.update()
    assert samples_of(registry.collect()) == samples(own)
    rows = "piecegraph_rows_total", {"mode": "NONE"}
    own(torch.ones(12, 4), batch=Batch(12, 12))
    metrics.update()  # too early
    assert registry.get_sample_value(*rows) == 12
    metrics.now = lambda: float("inf")
    metrics.update()
    assert registry.get_sample_value(*rows) == 24


def test_durations_of_steps_are_a_histogram_while_steps_are_kept(own):
    assert not [name for name in samples(own) if name[0].startswith("piecegraph_step_seconds")]
    own.parts.log.keep(2)
    for _ in range(5):
        own(torch.ones(4, 4), batch=Batch(4, 4))
    found = samples(own)
    assert found["piecegraph_step_seconds_bucket", "FULL", "+Inf"] == 5
    assert found["piecegraph_step_seconds_count", "FULL"] == 5
    assert found["piecegraph_step_seconds_count", "NONE"] == 0
    assert found["piecegraph_step_seconds_sum", "FULL"] > 0
    registry = CollectorRegistry()
    registry.register(MetricsCollector(own))
    labels = {"mode": "FULL", "le": "+Inf"}
    assert registry.get_sample_value("piecegraph_step_seconds_bucket", labels) == 5


def test_captures_compiles_and_recordings_are_counted(prepared):
    found = samples(prepared)
    assert found["piecegraph_captures_total", "FULL"] == 2
    assert found["piecegraph_capture_seconds_total", "FULL"] > 0
    assert found["piecegraph_compiles_total", "eager"] == 1
    after_seal = {name[1]: n for name, n in found.items() if name[0].startswith("piecegraph_after")}
    assert set(after_seal.values()) == {0}
    assert "trace" in after_seal
    assert found["piecegraph_recordings",] == 2
    assert found["piecegraph_recording_bytes",] > 0
    assert found["piecegraph_startup_seconds", "prepare"] > 0


def test_what_happens_after_seal_and_what_is_released_is_counted(own):
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert samples(own)["piecegraph_after_seal_total", "trace"] == 1
    assert samples(own)["piecegraph_recordings",] == 2
    own.release()
    assert samples(own)["piecegraph_recordings",] == 0


def test_startup_is_what_the_report_says_without_captures_under_traffic(own):
    for _ in range(2):
        with own.events.span("toolchain"):
            pass
    report = own.report()["startup"]
    sums = Counter({"prepare": report["prepare_seconds"]})
    for phase in report["phases"]:
        sums[phase["name"]] += phase["seconds"]
    name = "piecegraph_startup_seconds"
    found = {labels[0]: value for (each, *labels), value in samples(own).items() if each == name}
    assert found == pytest.approx(sums)
    assert found.keys() >= {"prepare", "trace.dynamo", "capture"}
    assert [span for span in own.events.spans if span.name == "capture.session"]
    assert "capture.session" not in found


def test_the_text_is_what_prometheus_reads(prepared):
    def by_labels(families):
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
        }

    read = by_labels(text_string_to_metric_families(metrics_text(prepared)))
    assert read == pytest.approx(by_labels(read_metrics(prepared)))


def test_a_registry_collects_the_same_with_labels_of_its_own(prepared):
    registry = CollectorRegistry()
    registry.register(MetricsCollector(prepared, {"rank": "3"}))
    labels = {"rank": "3", "mode": "FULL", "reason": "padded"}
    assert registry.get_sample_value("piecegraph_steps_total", labels) == 2
    assert registry.get_sample_value("piecegraph_recordings", {"rank": "3"}) == 2


def test_counts_and_bytes_are_apart_and_a_miss_counts_once(own):
    for name in ("hit", "hit.private", "miss", "miss.absent", "miss", "miss.corrupt"):
        own.events.count(f"cache.{name}")
    own.events.count("cache.bytes_written", 1_249_732)
    own.events.count("cache.milliseconds_saved", 1500)
    found = samples(own)
    events = {name[1]: n for name, n in found.items() if name[0] == "piecegraph_cache_events_total"}
    assert events == {
        "hit": 1, "miss": 2, "published": 0, "publish_failed": 0, "quarantined": 0, "evicted": 0,
        "duplicate_work": 0,
    }  # fmt: skip
    assert found["piecegraph_cache_misses_total", "absent"] == 1
    assert found["piecegraph_cache_hits_total", "private"] == 1
    assert found["piecegraph_cache_bytes_total", "written"] == 1_249_732
    assert found["piecegraph_cache_bytes_total", "read"] == 0
    assert found["piecegraph_cache_saved_seconds_total",] == 1.5


def test_the_version_and_the_mode_are_an_info_metric(prepared):
    labels = (piecegraph.__version__, version("torch"), "FULL", "eager", "eager")
    assert samples(prepared)[("piecegraph_info", *labels)] == 1


def test_a_bundle_is_verified_or_stale_or_neither_is_known(own):
    assert ("piecegraph_bundle_verified",) not in samples(own)
    own.records.add(Verified(0.1))
    assert samples(own)["piecegraph_bundle_verified",] == 1
    own.records.add(Stale(0.1, "piece 0"))
    assert samples(own)["piecegraph_bundle_verified",] == 0


def test_one_collector_serves_several_models(prepared, own):
    registry = CollectorRegistry()
    registry.register(MetricsCollector({"draft": prepared, "target": own}))
    assert registry.get_sample_value("piecegraph_recordings", {"model": "draft"}) == 2
    text = generate_latest(registry).decode()
    for name in ("piecegraph_steps_total", "piecegraph_recordings"):
        assert text.count(f"# TYPE {name} ") == 1
    assert registry.get_sample_value("piecegraph_recordings", {"model": "target"}) is not None


def test_labels_are_escaped(prepared):
    prepared.events.count('cache.a"b\\c\n')
    assert 'event="a\\"b\\\\c\\n"' in metrics_text(prepared)
