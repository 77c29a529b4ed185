"""The library's log on standard error, for the command line."""

from __future__ import annotations

import logging

from ...cache.keys.environment import LOG_LEVEL, read
from ...errors import InvalidSetting

LEVELS = ("debug", "info", "warning", "error")


def log_to_stderr() -> None:
    """Show the log from the level in PIECEGRAPH_LOG_LEVEL on, warnings by default."""
    level = (read(LOG_LEVEL) or "warning").casefold()
    if level not in LEVELS:
        raise InvalidSetting(
            name=LOG_LEVEL,
            value=level,
            reason="there is no such level",
            expected="one of " + ", ".join(LEVELS),
        )
    log = logging.getLogger("piecegraph")
    log.setLevel(level.upper())
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
