"""Python objects that a configuration names: `module:attribute`, or an entry point."""

from __future__ import annotations

import importlib
from functools import reduce
from importlib.metadata import entry_points
from typing import Any

from ...errors import InvalidSetting


def named_object(name: str, group: str) -> Any:
    """The object called `name`; raises InvalidSetting where there is none."""
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return reduce(getattr, attribute.split("."), importlib.import_module(module))
        (found,) = entry_points(group=group, name=name)
        return found.load()
    except (ImportError, AttributeError, ValueError) as error:
        raise InvalidSetting(
            name=group,
            value=name,
            reason=f"nothing is found under that name ({error})",
            expected=f"module:attribute, or an entry point of the group {group}",
        ) from error
