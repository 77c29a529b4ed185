"""Every setting feeds the keys it declares, and no others; every exemption has a reason."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from piecegraph.cache.keys.factors import exemptions
from piecegraph.compile.bundle.key_factors import codegen_key, machine_key, trace_key
from piecegraph.compile.passes.graph_pass import passes_for
from piecegraph.dispatch import Axis, BucketLimits, PaddingLimit
from piecegraph.errors import InvalidSetting
from piecegraph.runtime.config import Config

CPU = torch.device("cpu")


def other_pass(graph: Any) -> None:
    graph.lint()


def by_name(node: Any) -> bool:
    return "attention" in node.name


OTHER: dict[str, Any] = {
    "splitting_ops": ("a::b",),
    "splitting_patterns": ("a::*",),
    "splitting_predicate": by_name,
    "use_inductor_graph_partition": True,
    "inputs": {"x": "float32[num_tokens, 4]"},
    "max_num_tokens": 77,
    "min_num_tokens": 2,
    "symbol_limits": {"other": (1, 5)},
    "dynamic_shapes": "unbacked",
    "guards": "check",
    "compiler": "eager",
    "compile_ranges": (16,),
    "compile_sizes": (4,),
    "inductor_options": {"max_autotune": True},
    "pass_switches": {"no_op": False},
    "user_passes": (other_pass,),
    "compile": False,
    "dedupe": False,
    "dump_dir": Path("/elsewhere"),
    "bundle": "force",
    "cache": False,
    "cache_dir": Path("/elsewhere"),
    "cache_layers": ("/elsewhere",),
    "cache_bytes": 1 << 20,
    "cache_age_days": 3.0,
    "cold": "serve",
    "level": 1,
    "graph_mode": "PIECEWISE",
    "attention_support": 3,
    "max_num_reqs": 3,
    "query_len": 3,
    "query_lens": (1, 3),
    "speculation_schedule": (3, 1),
    "max_loras": 2,
    "lora_graphs": "one",
    "axes": (Axis("micro_batches", (1, 2)),),
    "traits": {"pooling": True},
    "size_alignment": 2,
    "buckets": ((1, 8, 0),),
    "bucket_limits": BucketLimits(16, 64, 128, 4),
    "capture_sizes": (1, 2),
    "strategy": "lazy",
    "captures_per_step": 3,
    "memory_limit": 0.5,
    "lazy_bytes": 3,
    "after_seal": "raise",
    "padding": {"x": "repeat"},
    "padding_limit": PaddingLimit(),
    "broken_guard": "eager",
    "graph_backend": "replay",
}
"""A value of each setting that is not its default."""

BY_SOURCE = {"splitting_predicate", "pass_switches", "user_passes"}
"""Settings that name code: exempt as values, and factors by what they name."""

TRACE_ONLY = {"splitting_predicate"}


def keys(config: Config) -> tuple[str, str]:
    model = torch.nn.Linear(4, 4)
    codegen = codegen_key(machine_key(config, CPU), "piece", passes_for(config), None)
    return trace_key(model, config, CPU).digest, codegen.digest


def test_help_on_the_settings_is_not_full_of_reasons() -> None:
    assert "reason=" not in str(inspect.signature(Config))


def test_each_exemption_has_a_reason() -> None:
    assert all(len(feeds.reason) > 10 for feeds in exemptions(Config).values())


@pytest.mark.parametrize("name", sorted(Config.model_fields))
def test_c1_vllm_53366_a_changed_setting_changes_its_keys_and_no_others(name: str) -> None:
    given = {"inputs": {"x": "float32[num_tokens, other]"}}
    before, after = keys(Config(**given)), keys(Config(**{**given, name: OTHER[name]}))
    feeds = exemptions(Config).get(name)
    kinds = ("trace", "codegen") if feeds is None else feeds.kinds
    expected = [kind in kinds for kind in ("trace", "codegen")]
    if name in BY_SOURCE:
        expected = [True, name not in TRACE_ONLY]
    assert [old != new for old, new in zip(before, after, strict=True)] == expected


def test_pass_with_other_source_is_another_key() -> None:
    def same_name(gain: int) -> Any:
        return lambda graph: graph.lint() or gain

    keyed = {keys(Config(user_passes=(same_name(gain),)))[1] for gain in (1, 2)}
    assert len(keyed) == 2


def test_layers_are_read_from_places_and_mappings() -> None:
    given = ("/layer", {"at": "s3://bucket", "trust": "anybody", "write_back": True})
    first, second = Config(cache_layers=given).cache_layers
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
def test_layers_that_contradict_themselves_are_refused(layer: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        Config(cache_layers=(layer,))
