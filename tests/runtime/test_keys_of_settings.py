"""Which keys a setting is in: the trace key, the codegen keys, both or none."""

from functools import cache

import pytest
import torch

from piecegraph.cache.keys.key import diff
from piecegraph.compile.bundle.key_factors import codegen_key, documented, machine_key, trace_key
from piecegraph.config import Config, compile_config
from piecegraph.dispatch import Axis, BucketLimits, BucketMemory, PaddingLimit
from piecegraph.errors import InvalidSetting
from piecegraph.settings import setting_names
from tests.tables import tables_of

CPU = torch.device("cpu")


def other_pass(graph):
    graph.lint()


def by_name(node):
    return "attention" in node.name


BOTH, TRACE, NONE = (True, True), (True, False), (False, False)

KEYS = {"both": BOTH, "trace": TRACE, "none": NONE}
OTHER = {
    **{
        name: (value, KEYS[keys])
        for keys, settings in tables_of(__file__).items()
        for name, value in settings.items()
    },
    "codegen.passes": ({"own": other_pass}, BOTH),
    "sizes.padding_limit": (PaddingLimit(), NONE),
    "sizes.bucket_limits": (BucketLimits(16, 64, 128, 4), NONE),
    "sizes.bucket_memory": (BucketMemory(0.5), NONE),
    "variants.axes": ((Axis("micro_batches", (1, 2)),), NONE),
}
"""A value of each setting that is not its default, and the keys that it changes."""

OBJECTS = {"tracing", "codegen", "sizes", "variants", "attention", "steps", "shadow"}


def keys(config):
    compiling = compile_config(config)
    codegen = codegen_key(machine_key(compiling.code, CPU), "piece", compiling.passes, None)
    return trace_key(torch.nn.Linear(4, 4), compiling, CPU).digest, codegen.digest


@cache
def base_and_keys(strategy):
    base = Config(inputs={"x": "float32[num_tokens, other]"}, strategy=strategy)
    return base, keys(base)


def changed_keys(name, value):
    base, before = base_and_keys("lazy" if name.startswith("strategy.") else "eager")
    after = keys(base.changed(**{name: value}))
    return (before[0] != after[0], before[1] != after[1])


@pytest.mark.parametrize("name", sorted(OTHER))
def test_c1_vllm_53366_failure_W9_a_changed_setting_changes_its_keys_and_no_others(name):
    value, expected = OTHER[name]
    assert changed_keys(name, value) == expected


def test_a_difference_of_keys_is_called_after_its_setting():
    inputs, model = {"x": "float32[num_tokens, other]"}, torch.nn.Linear(4, 4)
    for name, (value, (traced, _)) in OTHER.items():
        base = Config(inputs=inputs)
        old, new = (
            trace_key(model, compile_config(config), CPU).factors
            for config in (base, base.changed(**{name: value}) if traced else base)
        )
        shown = {documented(each).partition(":")[0].partition(".x")[0] for each in diff(old, new)}
        assert all(each.startswith(name) for each in shown), (name, shown)
    (threads,) = diff({"device": {"threads": 1}}, {"device": {"threads": 2}})
    assert documented(threads) == "device.threads (OMP_NUM_THREADS): 1 -> 2"


def test_each_setting_was_changed_and_there_are_at_most_45():
    names = {n for n in setting_names(Config) if not n.startswith("cache.layers.")} - OBJECTS
    assert names == OTHER.keys()
    assert len(names) <= 45


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("splitting_ops", ("a::*",), TRACE),
        ("splitting_ops", (by_name,), TRACE),
        ("codegen.passes", {"functionalization": False}, BOTH),
        ("codegen.passes", {"functionalization": True}, NONE),
        ("codegen.passes", {"dedupe": False}, TRACE),
        ("bundle", "serve", NONE),
        ("bundle", "serve_ahead", NONE),
    ],
)
def test_what_a_setting_means_is_in_keys(name, value, expected):
    assert changed_keys(name, value) == expected


def test_autotuned_code_is_another_artifact():
    plain, tuned = (Config(level=level, codegen={"sizes": (4,)}) for level in (2, 3))
    assert all(a != b for a, b in zip(keys(plain), keys(tuned), strict=True))


def test_pass_with_other_source_is_another_key():
    def same_name(gain):
        return lambda graph: graph.lint() or gain

    keyed = {keys(Config(codegen={"passes": {"own": same_name(gain)}}))[1] for gain in (1, 2)}
    assert len(keyed) == 2


class Uuid:
    def uuid(self):
        return b"1"


OPTIONS = [
    ({"max_autotun": True}, "no such option.*did you mean 'max_autotune'"),
    ({"cpp.thread": 1}, r"did you mean 'cpp\.threads'"),
    ({"post_grad_custom_post_pass": Uuid()}, r"post_grad_custom_post_pass.*codegen\.passes"),
    ({"joint_custom_pre_pass": print}, r"joint_custom_pre_pass.*codegen\.passes"),
    ({"aot_inductor.output_path": "/tmp/a.so"}, "is a place, so that it cannot be in a key"),
]
"""Inductor options, and what the error says."""


@pytest.mark.parametrize(("options", "match"), OPTIONS)
def test_what_inductor_or_a_key_would_refuse_is_refused_when_a_config_is_made(options, match):
    with pytest.raises(InvalidSetting, match=match):
        Config(codegen={"inductor_options": options})


def test_layers_are_read_from_places_and_mappings():
    layers = ("/layer", {"at": "s3://bucket", "trust": "anybody", "write_back": True})
    config = Config(cache={"layers": layers})
    assert config.cache
    first, second = config.cache.layers
    assert (first.at, first.trust.value, first.is_url) == ("/layer", "signed", False)
    assert (second.trust.value, second.write_back) == ("anybody", True)


@pytest.mark.parametrize(
    "layer",
    [
        {"at": "/layer", "trust": "pinned"},
        {"at": "/layer", "digests": ("a",)},
        {"at": "/layer", "write_back": True},
    ],
)
def test_layers_that_contradict_themselves_are_refused(layer):
    with pytest.raises(InvalidSetting, match=r"cache\.layers"):
        Config(cache={"layers": (layer,)})
