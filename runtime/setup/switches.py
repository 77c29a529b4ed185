"""Switches: each turns off one part of the library, to find the part that causes a fault.

A switch is a set of ordinary settings. `PIECEGRAPH_OFF=graphs,cache` turns parts off in any engine
without a change of its code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ...cache.keys.environment import DUMP_DIR, FASTER, parts_off, read
from ...config import Config, check_choice
from ...errors import InvalidSetting

SWITCHES: Mapping[str, Mapping[str, Any]] = {
    "all": {"compile": False, "graph_mode": "NONE", "cache": False},
    "compile": {"compile": False},
    "graphs": {"graph_mode": "NONE"},
    "inductor": {"compiler": "eager", "codegen.partition": "graph"},
    "cache": {"cache": False},
    "verification": {"cache.verify_bundle": "off"},
    "dedupe": {"codegen.passes.dedupe": False},
    "guard-proof": {"tracing.guards": "drop"},
}
"""What is turned off, and the settings that do it."""

PARTS: Mapping[str, str] = {
    "proof": "no step is proved, and padding is trusted",
    "ranks": "each rank runs as a single process",
    "starts": "a start loads or compiles; nothing is verified, and nothing serves meanwhile",
    "regions": "regions that a model compiles itself are not counted and not stored",
    "strategies": "all graphs are captured at startup, without a memory limit",
    "log": "no step is logged, and no observer is told",
    "checks": "steps run unchecked",
    "seal": "what compiles after `seal()` goes unnoticed",
}
"""The parts of a prepared model in their order, and what is missing without each.

`PIECEGRAPH_OFF` turns them off for a process: a part is no setting of a model.
"""


def switched_off(config: Config, names: Iterable[str]) -> Config:
    """`config` with the parts called `names` off; raises InvalidSetting for an unknown one."""
    for name in names:
        check_choice(SWITCHES, "off", name, "there is no such switch")
        settings = SWITCHES[name].items()
        off = {owner for owner in ("cache",) if getattr(config, owner) is False}
        config = config.changed(**{k: v for k, v in settings if k.partition(".")[0] not in off})
    return config


def resolve_config(config: Config) -> Config:
    """`config` with what the environment and the level decide.

    PIECEGRAPH_OFF turns parts off, and PIECEGRAPH_DUMP_DIR sets the dump directory. No setting
    turns off `faster`, which compiling reads, or one of `PARTS`. At a level that does not compile,
    pieces run eagerly unless a compiler is set. Raises InvalidSetting for what is no Config.
    """
    if not isinstance(config, Config):
        raise InvalidSetting(
            name="config",
            value=type(config).__name__,
            reason="it is not a Config",
            expected="Config(**settings)",
        )
    not_settings = {FASTER, *PARTS}
    config = switched_off(config, (name for name in parts_off() if name not in not_settings))
    settings: dict[str, Any] = {}
    if (folder := read(DUMP_DIR)) and config.codegen.dump_dir is None:
        settings["codegen.dump_dir"] = Path(folder)
    if config.level == 0 and "compiler" not in config.model_fields_set:
        settings |= SWITCHES["inductor"]
    return config.changed(**settings) if settings else config
