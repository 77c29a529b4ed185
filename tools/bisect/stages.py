"""The stages of a search: settings that add one part of the library after the other.

| stage         | what is new                                                   |
|---------------|---------------------------------------------------------------|
| traced graph  | Dynamo's graph, run node by node                              |
| split         | split at the splitting ops, each piece on its own, stitched   |
| dedupe        | equal pieces share one                                        |
| compiler      | pieces compiled, nothing read from a cache                    |
| warm cache    | pieces loaded from the cache                                  |
| partitions    | the graph whole, its code partitioned by Inductor             |
| PIECEWISE     | graphs with splitting ops between them, padded sizes          |
| FULL          | the mode that was asked for, all graphs captured at startup   |
| DELAYED, LAZY | the strategy that was asked for: captures between steps       |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import (
    BatchDescriptor,
    Config,
    Eager,
    GraphMode,
    PreparedModel,
    RuntimeMode,
    cache_root,
    prepare,
)
from ...dispatch import LEVEL_MODES, CaptureStrategy
from .case import BisectCase

EAGER, TRACED, SPLIT, DEDUPE = "eager", "traced graph", "split", "dedupe"
COMPILER, WARM, PARTITIONS = "compiler", "warm cache", "partitions"
PIECEWISE, FULL = "PIECEWISE", "FULL"
STRATEGIES = (CaptureStrategy.DELAYED.name, CaptureStrategy.LAZY.name)
GRAPHS = (PIECEWISE, FULL, *STRATEGIES)

MetadataFor = Callable[[BatchDescriptor, RuntimeMode], Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its name and the settings in which it differs from those asked for."""

    name: str
    settings: dict[str, Any]


def stages(config: Config) -> Iterator[Stage]:
    """The stages that `config` has, in order."""
    if config.compile:
        yield from _compiled_stages(config)
    mode = _requested_mode(config)
    if mode is not GraphMode.NONE:
        breaks = config.splitting_ops or (not config.compile and mode.needs_pieces)
        if breaks:
            yield Stage(PIECEWISE, {"graph_mode": GraphMode.PIECEWISE})
        if not breaks or mode is not GraphMode.PIECEWISE:
            yield Stage(FULL, {})
        if not isinstance(config.strategy, Eager):
            yield Stage(config.strategy.kind.name, {"strategy": config.strategy})


def _requested_mode(config: Config) -> GraphMode:
    """The graph mode that is asked for, by its name or by the level."""
    if config.graph_mode is not None:
        return config.graph_mode
    return LEVEL_MODES[config.level] if config.compile else GraphMode.NONE


def _compiled_stages(config: Config) -> Iterator[Stage]:
    """The stages without graphs."""
    split = {"graph_mode": GraphMode.NONE, "codegen.partition": "graph"}
    uncached = {**split, "cache": False}
    eager = {**uncached, "compiler": "eager"}
    yield Stage(TRACED, {**eager, "splitting_ops": ()})
    if config.splitting_ops:
        yield Stage(SPLIT, {**eager, "codegen.passes.dedupe": False})
        if config.codegen.passes.get("dedupe", True):
            yield Stage(DEDUPE, eager)
    if config.compiler != "eager":
        yield Stage(COMPILER, uncached)
    if config.cache and config.compiler == "inductor":
        yield Stage(WARM, split)
    if config.codegen.partition == "inductor" and config.splitting_ops:
        yield Stage(PARTITIONS, {"graph_mode": GraphMode.NONE})


def with_own_cache(case_config: Config, folder: Path) -> Config:
    """The same settings with `folder` as the cache; the user's cache is only read, as a layer."""
    root = cache_root(case_config)
    if root is None or not case_config.cache:
        return case_config
    users = ({"at": str(root), "trust": "anybody"},) if root.is_dir() else ()
    layers = (*users, *case_config.cache.layers)
    return case_config.changed(cache_dir=folder, cache={"layers": layers})


@contextmanager
def prepared_for(
    case: BisectCase, stage: Stage, capture_metadata: MetadataFor | None = None
) -> Iterator[PreparedModel]:
    """The case prepared and captured for `stage`; closed at the end.

    It is traced and captured as the process is in the first step. At the stage of the warm cache it
    is prepared twice, so that the second comes from a bundle.
    """
    config = case.config.changed(**{"strategy": Eager(), **stage.settings})
    for first in case.steps[:1]:  # as it makes its metadata, what Python keeps is as it was
        first.metadata_for(first.without_graph())
    if stage.name == WARM:
        _prepare(case, config).close()
    prepared = _prepare(case, config)
    try:
        prepared.capture(capture_metadata or case.capture_metadata)
        yield prepared
    finally:
        prepared.close()


def _prepare(case: BisectCase, config: Config) -> PreparedModel:
    examples = None if config.inputs else (case.steps[0].args, dict(case.steps[0].kwargs))
    return prepare(case.model, config, examples=examples, layers=case.layers)
