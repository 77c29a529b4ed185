"""Names that users write are checked against those that exist."""

from __future__ import annotations

from collections.abc import Collection

from ..errors import InvalidSetting


def must_be_one_of(known: Collection[str], setting: str, name: str, reason: str) -> None:
    """Raises InvalidSetting, with what there is to choose from, if `name` is not `known`."""
    if name not in known:
        expected = "one of " + ", ".join(known)
        raise InvalidSetting(name=setting, value=name, reason=reason, expected=expected)
