"""The ladder: settings that add one part of the library after the other.

| rung         | what is new on it                                       |
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
from .subject import Subject

EAGER, TRACED, SPLIT, DEDUPE = "eager", "traced graph", "split", "dedupe"
COMPILER, WARM, PARTITIONS = "compiler", "warm cache", "partitions"
PIECEWISE, FULL = "PIECEWISE", "FULL"


@dataclass(frozen=True, slots=True)
class Rung:
    """One rung: its name and the settings in which it differs from those asked for."""

    name: str
    settings: dict[str, Any]


def rungs(config: Config) -> Iterator[Rung]:
    """The rungs that `config` has, from the ground."""
    if config.compile:
        yield from _compiled_rungs(config)
    mode = _asked(config)
    if mode is not GraphMode.NONE:
        if config.splitting_ops:
            yield Rung(PIECEWISE, {"graph_mode": GraphMode.PIECEWISE})
        if not config.splitting_ops or mode is not GraphMode.PIECEWISE:
            yield Rung(FULL, {})


def _asked(config: Config) -> GraphMode:
    """The graph mode that is asked for, by its name or by the level."""
    if config.graph_mode is not None:
        return config.graph_mode
    return level_defaults(config.level).mode if config.compile else GraphMode.NONE


def _compiled_rungs(config: Config) -> Iterator[Rung]:
    """Those without graphs."""
    split = {"graph_mode": GraphMode.NONE, "use_inductor_graph_partition": False}
    plain = {**split, "cache": False}
    eager = {**plain, "compiler": "eager"}
    yield Rung(TRACED, {**eager, "splitting_ops": ()})
    if config.splitting_ops:
        yield Rung(SPLIT, {**eager, "dedupe": False})
        if config.dedupe:
            yield Rung(DEDUPE, eager)
    if config.compiler != "eager":
        yield Rung(COMPILER, plain)
    if config.cache and config.compiler == "inductor":
        yield Rung(WARM, split)
    if config.use_inductor_graph_partition:
        yield Rung(PARTITIONS, {"graph_mode": GraphMode.NONE})


@contextmanager
def prepared_for(subject: Subject, rung: Rung) -> Iterator[PreparedModel]:
    """The subject prepared and captured as `rung` says; closed at the end.

    On the rung of the warm cache it is prepared twice, so that the second comes from a bundle.
    """
    config = subject.config.changed(**{"strategy": CaptureStrategy.EAGER, **rung.settings})
    if rung.name == WARM:
        _prepare(subject, config).close()
    prepared = _prepare(subject, config)
    try:
        prepared.capture(subject.capture_metadata)
        yield prepared
    finally:
        prepared.close()


def _prepare(subject: Subject, config: Config) -> PreparedModel:
    examples = None if config.inputs else (subject.steps[0].args, dict(subject.steps[0].kwargs))
    return prepare(subject.model, config, examples=examples, layers=subject.layers)
