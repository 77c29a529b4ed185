"""Wrong configurations of real users, each told at the start or in the first steps."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph import Batch, Config, prepare
from piecegraph.dispatch import (
    Dispatcher,
    RuntimeMode,
    sizes_for,
    uncovered_decodes,
    unreached_sizes,
)
from piecegraph.runtime.core.records import record_kinds
from piecegraph.runtime.parts.log.first_steps import MOST
from piecegraph.runtime.setup.remarks import Remark, StepsMissed, remarks_of, shown
from piecegraph.tools.cli.app import main
from tests.tables import tables_of

from ..dispatch.test_dispatch_properties import plans
from .conftest import Computes

RIGHT = {
    "inputs": {"x": "float32[num_tokens, 4]"},
    "splitting_ops": ("told::attention",),
    "attention": {"support": "UNIFORM_BATCH"},
    "max_num_reqs": 8,
    "max_num_tokens": 64,
    "compiler": "eager",
    "cache": False,
}
SPECULATIVE = {"variants": {"query_lens": 4}}

WRONG = tables_of(__file__)


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_recipes_5_vllm_49549_a_wrong_configuration_is_told_with_its_remedy(wrong):
    told = remarks_of(Config(**(RIGHT | wrong["settings"])))
    what, todo = wrong["what"], wrong["todo"]
    assert [remark for remark in told if what in remark.what and todo in remark.todo], told


@pytest.mark.parametrize(
    "settings",
    [
        {},
        SPECULATIVE,
        {"capture_sizes": (1, 2, 4, 8)},
        {"graph_mode": "FULL_DECODE_ONLY", "capture_sizes": (8,), "codegen": {"sizes": (5,)}},
        {"graph_mode": "FULL_AND_PIECEWISE", "level": 2, "strategy": "eager"},
        {"strategy": "lazy", "codegen": {"sizes": (8,), "ranges": (32,)}, "level": 3},
        {"attention": {"support": "NEVER"}, "graph_mode": "PIECEWISE"},
        {"variants": {"max_loras": 2, "lora_graphs": "one"}, "steps": {"memory_limit": 0.5}},
        {"compile": False, "compiler": "inductor", "splitting_ops": ()},
    ],
    ids=str,
)
def test_nothing_is_told_of_a_right_one(settings):
    usual = {key: value for key, value in RIGHT.items() if key != "compiler"}
    assert remarks_of(Config(**(usual | settings))) == []


@given(plans, st.integers(1, 5), st.lists(st.integers(1, 45), unique=True))
def test_what_is_uncovered_is_what_the_dispatcher_says(plan, query_len, sizes):
    dispatcher = Dispatcher(plan)
    axes = {axis.name: axis.values[0] for axis in plan.axes} or None

    def decode(num_reqs):
        tokens = num_reqs * query_len
        batch = Batch(tokens, num_reqs, is_decode=True, query_len=query_len, axes=axes)
        return dispatcher.wanted(batch)

    reqs = range(1, min(plan.max_num_reqs, 45 // query_len) + 1)
    without = [n for n in reqs if decode(n).mode is RuntimeMode.NONE]
    assert uncovered_decodes(plan, query_len, 45) == without
    enough = sizes_for(plan, query_len, without)
    for n in without:
        fits = (s for s in enough if plan.least_tokens(s) <= n * query_len <= s)
        assert next(fits, None) is not None
    if not plan.axes:
        mixed = {n: dispatcher.wanted(Batch(n, 1)).descriptor.num_tokens for n in range(1, 46)}
        had = {*mixed.values(), *(e.descriptor.num_tokens for e in plan.entries)}
        had |= {decode(n).descriptor.num_tokens for n in reqs}
        sizes += {e.descriptor.num_tokens for e in plan.entries}.difference(sizes)
        assert unreached_sizes(plan, sizes, [query_len]) == [n for n in sizes if n not in had]


def test_numbers_are_shown_as_runs():
    assert shown([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7, 8"
    assert shown(range(1, 40, 3)) == "1, 4, 7, 10, 13, …, 37"


DECODE, UNSTATED = Batch(3, 3, is_decode=True, query_len=1), "does not state that a step decodes"
FIRST_STEPS = {
    "decode is never stated": ({}, [Batch(3, 3)], UNSTATED),
    "its query length is not stated": (SPECULATIVE, [Batch(8, 2, is_decode=True)], UNSTATED),
    "adapters that no graph has": ({}, [replace(DECODE, num_loras=2)], "LoRA case missing"),
    "steps above every size": ({"capture_sizes": (1, 8)}, [Batch(20, 1)], "above largest size"),
    "prefills among stated decodes": ({}, [DECODE, Batch(1, 1), Batch(9, 2)], None),
}


@pytest.fixture(scope="module")
def told(temporary_op):
    temporary_op("told::attention", "(Tensor x) -> Tensor", lambda x: x + 1, torch.empty_like)
    return Computes(lambda x: torch.ops.told.attention(x * 2))


@pytest.mark.compile
def test_first_steps_say_what_the_engine_does_not_state(told):
    for name, (settings, batches, reason) in FIRST_STEPS.items():
        prepared = prepare(told, Config(**(RIGHT | settings)))
        prepared.capture(lambda descriptor, mode: None)
        for _ in range(MOST):
            for batch in batches:
                prepared.dispatch(batch)
        missed = prepared.records.of(StepsMissed)
        assert len(missed) == (reason is not None), name
        assert reason is None or (reason in missed[0].what and missed[0].todo), name
        assert not prepared._core.steps.decided, "steps are looked at for ever"
        prepared.close()


@pytest.mark.compile
def test_capture_that_is_never_called_is_told_and_reported(told):
    wrong = WRONG["sizes in requests"]
    prepared = prepare(told, Config(**(RIGHT | wrong["settings"])))
    for _ in range(20):
        prepared(torch.ones(3, 4), batch=DECODE)
    report = prepared.report()["remarks"]
    assert [row["what"] for row in report["uncovered"]] == [wrong["what"]]
    assert "not captured yet" in report["steps"][0]["what"]
    kinds = [kind for kind in record_kinds(Remark) if kind is not Remark]
    assert {kind.report for kind in kinds} == {f"remarks.{key}" for key in report}


def test_doctor_reads_settings_without_a_model(tmp_path, capsys):
    path = tmp_path / "config.json"
    wrong = WRONG["sizes in requests"]
    told, nothing = (RIGHT | wrong["settings"], 1, wrong["todo"]), (RIGHT, 0, "no step is slow")
    for settings, status, line in (told, nothing):
        path.write_text(json.dumps(settings))
        assert main(["doctor", "--config", str(path)]) == status
        shown = " ".join(capsys.readouterr().out.split())
        assert line in shown
        assert (wrong["what"] in shown) == bool(status)
