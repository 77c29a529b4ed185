"""Wrong configurations of real users, each told at the start or in the first steps."""

import json

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

from ..dispatch.test_dispatch_properties import plans

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

WRONG = {
    # DGX Spark recipes#5: six requests of four tokens, sizes of one
    "sizes in requests": (
        {**SPECULATIVE, "capture_sizes": (1, 2, 4, 6), "max_num_reqs": 6},
        "decodes of 2 to 6 requests with 4 tokens have no graph",
        "Add 24 to capture_sizes, which are in tokens.",
    ),
    # vllm-ascend#16049
    "sizes on a grid that max_num_reqs is not on": (
        {"capture_sizes": (1, 2, 4, 8), "max_num_reqs": 12},
        "decodes of 9 to 12 requests with 1 tokens have no graph",
        "Add 12 to capture_sizes",
    ),
    "padding that is not allowed": (
        {"sizes": {"padding_limit": {"tokens": 0}}, "capture_sizes": (1, 2, 4, 8)},
        "decodes of 3, 5 to 7 requests with 1 tokens have no graph",
        "Add 3, 5 to 7 to capture_sizes",
    ),
    # vllm#49549
    "compile sizes that padding makes unreachable": (
        {"codegen": {"sizes": (1, 2, 6)}, "capture_sizes": (3, 6, 12)},
        "codegen.sizes has 1, 2, and each step of so many tokens is padded",
        "Compile sizes that are captured",
    ),
    "attention that is not declared": (
        {"attention": {}},
        "graph mode FULL_AND_PIECEWISE is PIECEWISE",
        "Declare what attention can do",
    ),
    # vllm-ascend#7148: FULL, and drafts that attention cannot take
    "drafts that attention does not support": (
        {
            **SPECULATIVE,
            "graph_mode": "FULL_AND_PIECEWISE",
            "attention": {"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
        },
        "so decode of query length 4 cannot be FULL",
        "correct what it lacks",
    ),
    # SemiAnalysisAI/InferenceX#1755: graphs turned off beside their sizes
    "sizes without graphs": (
        {"graph_mode": "NONE", "capture_sizes": (1, 2)},
        "capture_sizes has no effect beside graph_mode",
        "Leave one of them out.",
    ),
    "LoRA graphs without LoRA": (
        {"variants": {"lora_graphs": "by_count"}},
        "variants.lora_graphs has no effect",
        "Leave it out.",
    ),
    "a directory for no cache": (
        {"cache_dir": "/tmp/none"},
        "cache_dir has no effect beside cache",
        "Leave one of them out.",
    ),
    "compile ranges of a model that is not compiled": (
        {"compile": False, "graph_mode": "FULL", "codegen": {"ranges": (16,)}}
        | {"attention": {"support": "ALWAYS"}},
        "codegen.ranges has no effect beside compile",
        "Leave one of them out.",
    ),
    "buckets beside sizes": (
        {"sizes": {"buckets": ((1, 1, 1),)}, "capture_sizes": (1, 2)},
        "capture_sizes has no effect beside sizes.buckets",
        "Leave one of them out.",
    ),
    "shares of memory that has no limit": (
        {"sizes": {"buckets": ((1, 1, 1),), "bucket_memory": {"prompt_share": 0.5}}},
        "sizes.bucket_memory has no effect",
        "Leave it out.",
    ),
}


@pytest.mark.parametrize("settings", WRONG.values(), ids=WRONG)
def test_recipes_5_vllm_49549_a_wrong_configuration_is_told_with_its_remedy(settings):
    wrong, what, todo = settings
    told = remarks_of(Config(**(RIGHT | wrong)))
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
        assert unreached_sizes(plan, sizes, [query_len]) == [n for n in sizes if n not in had]


def test_numbers_are_shown_as_runs():
    assert shown([1, 2, 3, 5, 7, 8]) == "1 to 3, 5, 7, 8"
    assert shown(range(1, 40, 3)) == "1, 4, 7, 10, 13, …, 37"


FIRST_STEPS = {
    "decode is never stated": ({}, [Batch(3, 3)], "does not state that a step decodes"),
    "its query length is not stated": (
        SPECULATIVE,
        [Batch(8, 2, is_decode=True)],
        "does not state that a step decodes",
    ),
    "adapters that no graph has": (
        {},
        [Batch(3, 3, is_decode=True, query_len=1, num_loras=2)],
        "LoRA case missing",
    ),
    "steps above every size": (
        {"capture_sizes": (1, 8)},
        [Batch(20, 1)],
        "above largest size",
    ),
    "prefills among stated decodes": (
        {},
        [Batch(3, 3, is_decode=True, query_len=1), Batch(1, 1), Batch(9, 2)],
        None,
    ),
}


class Told(torch.nn.Module):
    def forward(self, x):
        return torch.ops.told.attention(x * 2)


@pytest.fixture(scope="module", autouse=True)
def _op():
    library = torch.library.Library("told", "FRAGMENT")
    library.define("attention(Tensor x) -> Tensor")
    torch.library.register_fake("told::attention", torch.empty_like, lib=library)
    library.impl("attention", lambda x: x + 1, "CompositeExplicitAutograd")
    return library


@pytest.mark.compile
def test_first_steps_say_what_the_engine_does_not_state():
    for name, (settings, batches, reason) in FIRST_STEPS.items():
        prepared = prepare(Told(), Config(**(RIGHT | settings)))
        prepared.capture(lambda descriptor, mode: None)
        for _ in range(MOST):
            for batch in batches:
                prepared.dispatch(batch)
        told = prepared.records.of(StepsMissed)
        assert len(told) == (reason is not None), name
        assert reason is None or (reason in told[0].what and told[0].todo), name
        assert not prepared._core.steps.decided, "steps are looked at for ever"
        prepared.close()


@pytest.mark.compile
def test_capture_that_is_never_called_is_told_and_reported():
    wrong, what, _ = WRONG["sizes in requests"]
    prepared = prepare(Told(), Config(**(RIGHT | wrong)))
    for _ in range(20):
        prepared(torch.ones(3, 4), batch=Batch(3, 3, is_decode=True, query_len=1))
    report = prepared.report()["remarks"]
    assert [row["what"] for row in report["uncovered"]] == [what]
    assert "not captured yet" in report["steps"][0]["what"]
    kinds = [kind for kind in record_kinds(Remark) if kind is not Remark]
    assert {kind.report for kind in kinds} == {f"remarks.{key}" for key in report}


def test_doctor_reads_settings_without_a_model(tmp_path, capsys):
    path = tmp_path / "config.json"
    wrong, what, todo = WRONG["sizes in requests"]
    for settings, status, line in ((RIGHT | wrong, 1, todo), (RIGHT, 0, "no step is slow")):
        path.write_text(json.dumps(settings))
        assert main(["doctor", "--config", str(path)]) == status
        shown = " ".join(capsys.readouterr().out.split())
        assert line in shown
        assert (what in shown) == bool(status)
