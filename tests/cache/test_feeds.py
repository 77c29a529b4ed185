"""Every field feeds every key unless annotated otherwise: change each and see which keys change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel

from piecegraph.cache.keys.factors import Feeds, config_factors, exempt, exemptions
from piecegraph.cache.keys.key import Key
from piecegraph.errors import InvalidFactor

KINDS = ("trace", "codegen", "capture")


class Passes(BaseModel):
    fuse: bool = True
    order: tuple[str, ...] = ("a", "b")
    dump_to: Annotated[Path, exempt("where people look")] = Path("/tmp/x")


class OtherPasses(BaseModel):
    fuse: bool = True
    order: tuple[str, ...] = ("a", "b")


class Config(BaseModel, extra="allow"):
    level: int = 2
    splitting_ops: frozenset[str] = frozenset({"attention"})
    sizes: Annotated[tuple[int, ...], Feeds(("capture",), "code is for any size")] = (1, 2)
    flags: Annotated[str, Feeds(("codegen", "trace"), "no graph depends on it")] = "-O2"
    verbose: Annotated[bool, exempt("what is shown")] = False
    passes: Passes | OtherPasses = Passes()
    ranges: list[Passes] = []
    by_name: dict[str, Passes] = {}


def keys(config: Config) -> dict[str, str]:
    return {kind: Key.of(kind, config_factors(config, kind)).digest for kind in KINDS}


MUTATIONS: list[tuple[dict[str, Any], set[str]]] = [
    ({"level": 3}, set(KINDS)),
    ({"splitting_ops": frozenset({"attention", "mamba"})}, set(KINDS)),
    ({"sizes": (1, 2, 4)}, {"capture"}),
    ({"flags": "-O3"}, {"codegen", "trace"}),
    ({"verbose": True}, set()),
    ({"passes": Passes(fuse=False)}, set(KINDS)),
    ({"passes": Passes(order=("b", "a"))}, set(KINDS)),
    ({"passes": Passes(dump_to=Path("/tmp/y"))}, set()),
    ({"passes": OtherPasses()}, set(KINDS)),
    ({"ranges": [Passes()]}, set(KINDS)),
    ({"by_name": {"x": Passes()}}, set(KINDS)),
    ({"something_new": 1}, set(KINDS)),
]


@pytest.mark.parametrize(("change", "changed"), MUTATIONS)
def test_c1_vllm_53366_failure_W9_a_mutation_changes_the_keys_it_feeds(
    change: dict[str, Any], changed: set[str]
) -> None:
    before, after = keys(Config()), keys(Config(**change))
    assert {kind for kind in KINDS if before[kind] != after[kind]} == changed


def test_every_field_was_mutated() -> None:
    assert Config.model_fields.keys() <= {name for change, _ in MUTATIONS for name in change}


def test_exemptions_carry_reasons() -> None:
    assert {name: feeds.reason for name, feeds in exemptions(Config).items()} == {
        "sizes": "code is for any size",
        "flags": "no graph depends on it",
        "verbose": "what is shown",
    }


def test_a_forgotten_path_is_an_error_and_not_a_factor() -> None:
    class Forgetful(BaseModel):
        model_dir: Path = Path("/models")

    with pytest.raises(InvalidFactor, match=r"trace\.model_dir"):
        Key.of("trace", config_factors(Forgetful(), "trace"))
