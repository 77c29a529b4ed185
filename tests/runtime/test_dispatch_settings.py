"""From settings to the graph mode in use and the sizes that are captured."""

import pytest

from piecegraph import Config, GraphMode, RuntimeMode
from piecegraph.config import dispatch_plan, resolve_graph_mode
from piecegraph.errors import FullModeUnsupported, InvalidSetting
from piecegraph.runtime.setup.remarks import ModeLowered, remarks_of

FULL, PIECEWISE = RuntimeMode.FULL, RuntimeMode.PIECEWISE

SERVING = {
    "max_num_tokens": 8192,
    "splitting_ops": ("a::b",),
    "attention": {"support": "UNIFORM_SINGLE_TOKEN_DECODE"},
}


def sizes(**settings):
    config = Config(**{**SERVING, **settings})
    plan = dispatch_plan(resolve_graph_mode(config).mode, config)
    found = {FULL: [], PIECEWISE: []}
    for entry in reversed(plan.entries):
        found[entry.mode].append(entry.descriptor.num_tokens)
    return found


def test_default_sizes_above_512_serve_decode_only():
    found = sizes(max_num_reqs=2048)
    assert found[PIECEWISE][-1] == 512
    assert found[FULL][-2:] == [1024, 2048]
    assert sizes(max_num_reqs=2048, capture_sizes=(8, 1024))[PIECEWISE] == [8, 1024]


def test_the_sizes_follow_the_alignment():
    assert all(size % 4 == 0 for size in sizes(sizes={"alignment": 4})[PIECEWISE])
    assert sizes(sizes={"alignment": 4}, capture_sizes=(1, 6, 8))[PIECEWISE] == [4, 8]


def test_a_speculation_schedule_gives_tiers():
    schedule = (15,) * 16 + (1,) * 112
    variants, attention = {"speculation_schedule": schedule}, {"support": "UNIFORM_BATCH"}
    found = sizes(variants=variants, max_num_reqs=128, attention=attention)
    assert {16 * 16, 2 * 128} <= {*found[FULL]}


def test_failure_10_w12_nothing_is_assumed_of_ops_that_declare_nothing():
    config = Config(max_num_tokens=64, splitting_ops=("a::b",))
    resolved = resolve_graph_mode(config)
    assert resolved.mode is GraphMode.PIECEWISE
    assert "attention.support is not set" in resolved.reasons[-1].why
    never = r"attention, for .* can never be .* no attention"
    with pytest.raises(FullModeUnsupported, match=never):
        config.changed(graph_mode="FULL")
    breakable = Config(max_num_tokens=64, compile=False, graph_mode="FULL_AND_PIECEWISE")
    resolved = resolve_graph_mode(breakable)
    assert resolved.mode is GraphMode.PIECEWISE
    assert "of which neither splitting_ops nor attention.support says" in resolved.reasons[-1].why
    unknown = "whether anything needs splitting.*no attention"
    with pytest.raises(FullModeUnsupported, match=unknown) as caught:
        breakable.changed(graph_mode="FULL")
    assert "group" not in str(caught.value)
    (remark,) = [r for r in remarks_of(breakable) if isinstance(r, ModeLowered)]
    assert "Declare what attention can do" in remark.todo
    without_attention = Config(max_num_tokens=64)
    assert resolve_graph_mode(without_attention).mode is GraphMode.FULL_DECODE_ONLY
    assert resolve_graph_mode(without_attention.changed(graph_mode="FULL")).mode is GraphMode.FULL


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("variants.query_lens", 0),
        ("variants.speculation_schedule", (2, -1)),
        ("variants.max_loras", -1),
        ("sizes.alignment", 0),
        ("max_num_reqs", 0),
        ("capture_sizes", (1, 2.5)),
        ("level", 4),
    ],
)
def test_what_dispatch_cannot_use_is_refused_as_a_setting(setting, value):
    with pytest.raises(InvalidSetting, match=setting):
        Config().changed(**{setting: value})
