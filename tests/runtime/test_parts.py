"""The protocol of parts: what is called when, which orders do not matter, and life without each."""

from __future__ import annotations

import ast
import gc
import random
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import piecegraph as pg
from piecegraph import Batch
from piecegraph.errors import (
    AutocastActive,
    BatchExceeded,
    BatchMismatch,
    DecisionOfAnother,
    InputMismatch,
    MovedTensor,
    StepInProgress,
)
from piecegraph.runtime import assemble
from piecegraph.runtime.core.check import Check
from piecegraph.runtime.core.steps import CORE_CHECKS, GRAPH_CHECKS
from piecegraph.runtime.part import Part
from piecegraph.runtime.setup.switches import PARTS

from .conftest import small_config

ROOT = Path(pg.__file__).parent
BATCH = Batch(3, 3, is_decode=True, query_len=1)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(8.0).view(8, 1), requires_grad=False)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.t().expand(4, 8))


def prepared_model(backend=None, input_buffers=None, **settings):
    config = small_config(16, inputs={"x": "float32[num_tokens, 8]"}, capture_sizes=(4, 8)).changed(
        **settings
    )
    return pg.prepare(Model(), config, backend=backend, input_buffers=input_buffers)


class Noting(Part):
    """Notes which methods the core calls. Written from `part.py` alone."""

    name = "noting"
    offers: ClassVar = {"noted": "noted"}

    def __init__(self, core):
        self.noted = []
        self.steps = 0

    def before_step(self, batch):
        self.noted.append("before_step")

    def decided(self, *facts):
        self.noted.append("decided")
        return False

    def checks(self, runs):
        return [Check("noting", self._count)]

    def around(self, run):
        def noted(*step):
            self.noted.append("around")
            return run(*step)

        return noted

    def captured(self, graph):
        self.noted.append(f"captured {graph.index}")

    def freed(self, graph):
        self.noted.append(f"freed {graph.index}")

    def code_replaced(self, code):
        self.noted.append("code_replaced")

    def watched(self, name):
        self.noted.append(f"watched {name}")

    def refreshing(self):
        self.noted.append("refreshing")

    def sealed(self):
        self.noted.append("sealed")

    def released(self):
        self.noted.append("released")

    def failed(self, error):
        self.noted.append(f"failed {type(error).__name__}")

    def facts(self):
        return {"noting": self.steps}

    def close(self):
        self.noted.append("close")

    def _count(self, *step):
        self.noted.append("check")
        self.steps += 1


@pytest.fixture
def noting(monkeypatch):
    """Each prepared model has a `Noting` part as its last one."""
    parts_of = assemble.parts_of

    def with_noting(core, beginning):
        yield from parts_of(core, beginning)
        yield Noting(core)

    monkeypatch.setattr(assemble, "parts_of", with_noting)
    monkeypatch.setattr(assemble, "PARTS", (*assemble.PARTS, Noting))


@pytest.mark.needs_part("checks")
@pytest.mark.usefixtures("noting")
def test_a_part_is_told_what_it_asks_for():
    prepared = prepared_model()
    noted = prepared.noted

    def since():
        told, noted[:] = noted[:], []
        return told

    assert since() == ["code_replaced"]
    prepared.capture()
    captured = since()
    assert captured == [f"captured {index}" for index in range(len(captured))] != []
    prepared.run(prepared.dispatch(BATCH), torch.ones(3, 8))
    assert since() == ["before_step", "decided", "around", "check"]
    prepared.run(prepared.dispatch(Batch(9, 1)), torch.ones(9, 8))  # without a graph
    assert since() == ["before_step", "decided", "around", "check"]
    with pytest.raises(pg.PiecegraphError):
        prepared.run(prepared.dispatch(BATCH), torch.ones(3, 9))
    assert since()[-1] == "failed InputMismatch"
    cache = torch.zeros(4)
    prepared.watch("cache", cache)
    prepared.refresh()
    assert since() == ["watched cache", "refreshing", "code_replaced"]
    prepared.seal()
    prepared.release()
    assert since() == ["sealed", *(f"freed {index}" for index in range(len(captured))), "released"]
    assert prepared.report()["noting"] == prepared.parts.noting.steps == 2
    prepared.close()
    assert since() == ["released", "close"]


@pytest.mark.usefixtures("noting")
def test_a_dropped_model_closes_its_parts():
    prepared = prepared_model()
    noted = prepared.noted
    del prepared
    assert noted[-1] == "close"


def test_a_dropped_model_whose_capture_failed_is_freed_at_once():
    """No cycle through an error keeps it: its monitor would watch what others compile."""
    backend = pg.ReplayBackend(pg.ReplayOptions(failing_captures=frozenset({1, 2, 3, 4})))
    prepared = prepared_model(backend=backend)
    prepared.parts.log.observe(Counting())
    gone = weakref.ref(prepared)

    def fails(call):
        try:
            call()
        except pg.PiecegraphError:
            return
        pytest.fail("it did not fail")

    gc.collect()
    gc.disable()
    try:
        fails(prepared.capture)
        fails(partial(prepared, torch.ones(3, 9), batch=BATCH))
        del prepared
        assert gone() is None
    finally:
        gc.enable()


def test_each_check_of_the_core_that_is_listed_refuses_a_step():
    buffer = torch.ones(16, 8)
    prepared = prepared_model(input_buffers={"x": buffer})
    prepared.capture()
    decision, wide = prepared.dispatch(BATCH), Batch(9, 9, is_decode=True, query_len=1)
    stranger = replace(decision, descriptor=prepared.dispatch(wide).descriptor)

    def under_autocast():
        with torch.autocast("cpu"):
            prepared.run(decision, buffer[:3])

    def inside_a_step():
        prepared._core.steps.running = True
        try:
            prepared.run(decision, buffer[:3])
        finally:
            prepared._core.steps.running = False

    refused = {
        "autocast is off, and no mode of torch's is entered": (AutocastActive, under_autocast),
        "forms and sizes of inputs, and fixed arguments": (
            InputMismatch, lambda: prepared.run(decision, torch.ones(3, 9))
        ),
        "tokens that the batch states": (
            BatchMismatch, lambda: prepared(buffer[:2], batch=BATCH)
        ),
        "the decision is one of this model": (
            DecisionOfAnother, lambda: prepared.run(stranger, buffer[:3])
        ),
        "no other step runs": (StepInProgress, inside_a_step),
        "sizes are those of the graph or less": (
            BatchExceeded, lambda: prepared.run(decision, buffer[:5])
        ),
        "the engine's input buffers are in place": (
            MovedTensor, lambda: prepared.run(decision, torch.ones(3, 8))
        ),
    }  # fmt: skip
    listed = [row["name"] for row in prepared.checks(decision) if row["owner"] == "core"]
    assert listed == [*refused]
    prepared.run(decision, buffer[:3])
    for error, call in refused.values():
        with pytest.raises(error):
            call()


@pytest.mark.needs_part("checks")
def test_the_listed_checks_are_those_that_run():
    prepared = prepared_model()
    prepared.capture()
    for decision in (None, prepared.dispatch(BATCH)):
        rows = prepared.checks(decision)
        core = prepared._core
        graph = None if decision is None else core.graphs.installed[decision.graph_index]
        runs = graph or core.code
        of_graph = [] if graph is None else ["core"] * len(GRAPH_CHECKS)
        own = ["core"] * len(CORE_CHECKS)
        assert [row["owner"] for row in rows] == [*own, *["checks"] * len(runs.checks), *of_graph]
        assert len(runs.checks) == len(core.parts.checks_of(runs))
        assert all(row["often"] for row in rows)
    names = [row["name"] for row in prepared.checks(prepared.dispatch(BATCH))]
    assert "addresses of weights and watched tensors" in names


@pytest.mark.needs_part("checks")
def test_where_no_graph_is_planned_a_step_compares_few_addresses_unless_all_are_asked_for():
    prepared = prepared_model(graph_mode="NONE")
    (row,) = [row for row in prepared.checks() if row["name"] == "addresses of weights"]
    assert "in turn" in row["often"]
    prepared.parts.checks.compare_all()
    assert "all in each step" in str(prepared.checks())


def scenario(prepared):
    """What a prepared model does in a life, without times."""
    results = []
    prepared.parts.log.keep(100)
    prepared.capture()
    for tokens in (3, 8, 9, 1, 3):
        batch = Batch(tokens, tokens, is_decode=True, query_len=1)
        results.append(prepared(torch.arange(tokens * 8.0).view(tokens, 8), batch=batch).tolist())
    prepared.seal()
    prepared.refresh()
    report = prepared.report()
    told = [event.name for event in prepared.events.events if event.name != "phase"]
    steps = [(step.mode, step.num_tokens, step.reason) for step in prepared.parts.log.last_steps()]
    kept = ("dispatch", "reasons", "memory", "graph_mode", "pieces", "cache")
    prepared.close()
    return {
        "results": results, "steps": steps, "told": told, **{name: report[name] for name in kept}
    }  # fmt: skip


@pytest.mark.needs_part("log")
@pytest.mark.parametrize("seed", range(4))
def test_an_order_that_does_not_matter_changes_nothing(monkeypatch, seed):
    """Any order that keeps what assemble.py states: proof first, then starts before strategies,
    the log after the proof."""
    expected = scenario(prepared_model())
    parts_of = assemble.parts_of

    def shuffled(core, beginning):
        parts = list(parts_of(core, beginning))
        order = random.Random(seed)
        while True:
            order.shuffle(parts)
            names = [part.name for part in parts]
            if names.index("starts") < names.index("strategies"):
                return iter(parts)

    monkeypatch.setattr(assemble, "parts_of", shuffled)
    got = scenario(prepared_model())
    got["told"], expected["told"] = sorted(got["told"]), sorted(expected["told"])
    assert got == expected


class Counting(pg.StepObserver):
    def __init__(self):
        self.steps = 0

    def ended(self, *step):
        self.steps += 1


@pytest.mark.needs_part("log")
@pytest.mark.needs_part("proof")
@pytest.mark.parametrize("proof_first", [True, False])
def test_observers_are_not_told_of_the_runs_of_a_proof(monkeypatch, proof_first):
    parts_of = assemble.parts_of

    def ordered(core, beginning):
        parts = list(parts_of(core, beginning))
        return iter(parts if proof_first else parts[::-1])

    monkeypatch.setattr(assemble, "parts_of", ordered)
    prepared = prepared_model(shadow={"every": 1, "share": 1.0})
    prepared.capture()
    observer = Counting()
    prepared.parts.log.observe(observer)
    prepared(torch.ones(3, 8), batch=BATCH)
    assert sum(row["count"] for row in prepared.report()["shadow"]["proved"]) == 1
    assert observer.steps == 1


def test_names_texts_and_docstrings_of_parts():
    assert [part.name for part in assemble.PARTS] == list(PARTS)
    for part in assemble.PARTS:
        text = sys.modules[part.__module__].__doc__ or ""
        stated = ("Guarantee: ", "Cost: ", f"PIECEGRAPH_OFF={part.name}")
        assert all(word in text for word in stated)
        for name, inner in part.offers.items():
            assert hasattr(part, inner) or name in ("step_log",)


@pytest.mark.needs_part("log")
@pytest.mark.parametrize("name", list(PARTS))
def test_without_a_part_steps_are_right(monkeypatch, name):
    expected = scenario(prepared_model())["results"]
    monkeypatch.setenv("PIECEGRAPH_OFF", name)
    prepared = prepared_model()
    assert name not in [part.name for part in prepared.parts]
    off = getattr(prepared.parts, name)
    assert not off
    assert off.anything.at_all(1) is None
    prepared.capture()
    assert prepared.recordings()
    for number, tokens in enumerate((3, 8, 9, 1, 3)):
        batch = Batch(tokens, tokens, is_decode=True, query_len=1)
        x = torch.arange(tokens * 8.0).view(tokens, 8)
        assert prepared(x, batch=batch).tolist() == expected[number]
    with torch.no_grad():
        prepared.compiled.model.weight.data = torch.ones(8, 1)
    assert len(prepared.refresh()) == len(prepared.recordings())
    assert prepared(torch.ones(3, 8), batch=BATCH).tolist() == [[8.0] * 4] * 3
    prepared.seal()
    prepared.close()


def test_an_unknown_part_and_an_unknown_attribute_are_named():
    prepared = prepared_model()
    with pytest.raises(AttributeError, match="no part 'nothing'; the parts are proof, ranks"):
        _ = prepared.parts.nothing
    with pytest.raises(AttributeError, match="no 'nothing', and no part offers it"):
        _ = prepared.nothing
    assert {"wait_until_verified", "memory_plan", "last_steps"} <= {*dir(prepared)}


def test_the_core_imports_no_part():
    files = [
        *(ROOT / "runtime/core").glob("*.py"), *(ROOT / "runtime/capture").glob("*.py"),
        *(ROOT / "runtime/setup").glob("*.py"), *(ROOT / "runtime/backends").rglob("*.py"),
        *(ROOT / "runtime" / f"{name}.py" for name in ("core_model", "part", "prepared_model")),
    ]  # fmt: skip
    assert len(files) > 40
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert "parts" not in (node.module or "").split("."), file
