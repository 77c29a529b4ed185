"""Each prepared model has separate records, even if it shares its events."""

import pytest
import torch

from piecegraph import Events, prepare
from piecegraph.runtime.core.records import (
    KEPT,
    CaptureFailure,
    CaptureRecord,
    Metric,
    Records,
    Switched,
)

from .conftest import Computes, small_config


def prepared_with(events):
    config = small_config(capture_sizes=(1, 2)).changed(max_num_reqs=2)
    return prepare(Computes(lambda x: x * 2), config, events=events)


@pytest.fixture
def events():
    torch._dynamo.reset()
    return Events()


def value(prepared, name):
    from piecegraph.tools.integrations.prometheus import read_metrics  # needs an extra

    (metric,) = [metric for metric in read_metrics(prepared) if metric.name == name]
    return sum(sample.value for sample in metric.samples)


def test_two_models_with_one_events_report_their_own(events):
    first = prepared_with(events)
    second = prepared_with(events)
    second.capture()
    second.release()
    second.capture()
    first.capture()
    reports = [first.report(), second.report()]
    assert [len(report["captures"]) for report in reports] == [2, 4]
    phases = [[phase["name"] for phase in report["startup"]["phases"]] for report in reports]
    assert [names.count("capture") for names in phases] == [1, 2]
    assert [names.count("trace.dynamo") for names in phases] == [1, 1]
    assert [report["counters"]["dynamo_traces"] for report in reports] == [1, 1]
    assert [value(model, "piecegraph_captures") for model in (first, second)] == [2, 4]
    assert len(events.named("capture")) == 6
    assert events.counters["dynamo_traces"] == 2


def test_vllm_27815_phases_add_up_to_prepare_and_to_the_start_of_the_process(events):
    startup = prepared_with(events).report()["startup"]
    seconds = [phase["seconds"] for phase in startup["phases"]]
    assert sum(seconds) == pytest.approx(startup["prepare_seconds"])
    assert min(seconds) >= 0
    names = [phase["name"] for phase in startup["phases"]]
    assert {"import dynamo", "trace", "trace.dynamo", "plan", "assemble", "other"} <= {*names}
    assert names.index("trace.dynamo") < names.index("trace") < names.index("other")
    spans = list(events.phases)
    whole = startup["before_prepare_seconds"] + startup["prepare_seconds"]
    assert whole == pytest.approx(Events.process_seconds(), abs=60)
    assert [span.own < span.seconds for span in spans if span.name == "prepare"] == [True]


def test_a_report_does_not_depend_on_the_event_log(events):
    prepared = prepared_with(events)
    prepared.capture()
    before = prepared.report()
    prepared.events.events.clear()
    prepared.events.spans.clear()
    assert prepared.report() == before


def test_records_have_a_bound():
    records = Records()
    for step in range(KEPT + 3):
        records.add(CaptureRecord("FULL", 8, 0, step, 1.0, 100, 90, 1, {}))
    captures = records.of(CaptureRecord)
    assert len(captures) == KEPT
    assert captures[-1].step == KEPT + 2


def test_what_a_record_states_is_in_report_and_metrics(events, monkeypatch):
    steps = Metric("piecegraph_failed_sizes", "Sum.", ("mode",), lambda each: each.num_tokens)
    monkeypatch.setattr(CaptureFailure, "report", "graphs.failed")
    monkeypatch.setattr(CaptureFailure, "metrics", (steps,))
    prepared = prepared_with(events)
    assert prepared.report()["graphs"] == {"failed": []}
    for size in (1, 2):
        prepared.records.add(CaptureFailure("FULL", size, 0, 3, "no memory", None))
    rows = prepared.report()["graphs"]["failed"]
    assert [row["num_tokens"] for row in rows] == [1, 2]
    assert value(prepared, "piecegraph_failed_sizes") == 3


def test_a_gauge_is_absent_until_its_first_record_and_keeps_it():
    (metric,) = Switched.metrics
    assert metric.samples([]) == {}
    assert metric.samples([Switched(3.0, 1, 2.0), Switched(9.0, 1, 2.0)]) == {(): 3.0}
