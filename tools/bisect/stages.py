"""The ladder: settings that add one part of the library after the other.

| stage         | what is new on it                                       |
|--------------|---------------------------------------------------------|
| traced graph | Dynamo's graph, run node by node                        |
| split        | cut at splitting ops, each piece on its own, stitched   |
| dedupe       | equal pieces share one                                  |
| compiler     | pieces compiled, nothing read from a cache              |
| warm cache   | pieces loaded from the cache                            |
| partitions   | the graph whole, its code cut by Inductor               |
| PIECEWISE    | graphs with attention in between, padded sizes          |
| FULL         | the mode that was asked for, with attention in graphs   |
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ... import CaptureStrategy, Config, GraphMode, PreparedModel, prepare
from ...dispatch import level_defaults
from .case import BisectCase

EAGER, TRACED, SPLIT, DEDUPE = "eager", "traced graph", "split", "dedupe"
COMPILER, WARM, PARTITIONS = "compiler", "warm cache", "partitions"
PIECEWISE, FULL = "PIECEWISE", "FULL"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its name and the settings in which it differs from those asked for."""

    name: str
    settings: dict[str, Any]


def stages(config: Config) -> Iterator[Stage]:
    """The stages that `config` has, from the ground."""
    if config.compile:
        yield from _compiled_stages(config)
    mode = _asked(config)
    if mode is not GraphMode.NONE:
        if config.splitting_ops:
            yield Stage(PIECEWISE, {"graph_mode": GraphMode.PIECEWISE})
        if not config.splitting_ops or mode is not GraphMode.PIECEWISE:
            yield Stage(FULL, {})


def _asked(config: Config) -> GraphMode:
    """The graph mode that is asked for, by its name or by the level."""
    if config.graph_mode is not None:
        return config.graph_mode
    return level_defaults(config.level).mode if config.compile else GraphMode.NONE


def _compiled_stages(config: Config) -> Iterator[Stage]:
    """Those without graphs."""
    split = {"graph_mode": GraphMode.NONE, "use_inductor_graph_partition": False}
    plain = {**split, "cache": False}
    eager = {**plain, "compiler": "eager"}
    yield Stage(TRACED, {**eager, "splitting_ops": ()})
    if config.splitting_ops:
        yield Stage(SPLIT, {**eager, "dedupe": False})
        if config.dedupe:
            yield Stage(DEDUPE, eager)
    if config.compiler != "eager":
        yield Stage(COMPILER, plain)
    if config.cache and config.compiler == "inductor":
        yield Stage(WARM, split)
    if config.use_inductor_graph_partition:
        yield Stage(PARTITIONS, {"graph_mode": GraphMode.NONE})


@contextmanager
def prepared_for(case: BisectCase, stage: Stage) -> Iterator[PreparedModel]:
    """The case prepared and captured as `stage` says; closed at the end.

    On the stage of the warm cache it is prepared twice, so that the second comes from a bundle.
    """
    config = case.config.changed(**{"strategy": CaptureStrategy.EAGER, **stage.settings})
    if stage.name == WARM:
        _prepare(case, config).close()
    prepared = _prepare(case, config)
    try:
        prepared.capture(case.capture_metadata)
        yield prepared
    finally:
        prepared.close()


def _prepare(case: BisectCase, config: Config) -> PreparedModel:
    examples = None if config.inputs else (case.steps[0].args, dict(case.steps[0].kwargs))
    return prepare(case.model, config, examples=examples, layers=case.layers)
