"""Switches: each part of the library turned off alone, to find the one at fault.

A switch is nothing but settings that `Config` has anyway. `PIECEGRAPH_OFF=graphs,cache` turns parts
off in any engine, without a change of its code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..cache.environment import DUMP_DIR, OFF, read
from ..errors import InvalidSetting
from .config import Config

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "all": {"compile": False, "graph_mode": "NONE", "cache": False},
    "compile": {"compile": False},
    "graphs": {"graph_mode": "NONE"},
    "inductor": {"compiler": "eager", "use_inductor_graph_partition": False},
    "cache": {"cache": False},
    "dedupe": {"dedupe": False},
    "guard-proof": {"guards": "drop"},
}
"""What is turned off, and the settings that do it."""


def switched_off(config: Config, names: Iterable[str]) -> Config:
    """`config` with the parts called `names` off; raises InvalidSetting for an unknown one."""
    settings: dict[str, Any] = {}
    for name in names:
        if name not in SWITCHES:
            raise InvalidSetting(
                name="off",
                value=name,
                reason="there is no such switch",
                expected="of " + ", ".join(SWITCHES),
            )
        settings.update(SWITCHES[name])
    return config.changed(**settings) if settings else config


def settled_by_environment(config: Config) -> Config:
    """`config` with the parts off that PIECEGRAPH_OFF names, dumped to PIECEGRAPH_DUMP_DIR."""
    config = switched_off(config, (name for name in (read(OFF) or "").split(",") if name))
    folder = read(DUMP_DIR)
    return config.changed(dump_dir=Path(folder)) if folder and config.dump_dir is None else config
