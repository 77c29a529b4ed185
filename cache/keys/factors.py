"""Factors of keys: what a value may be, and its canonical bytes.

A factor is plain data: None, bool, int, finite float, str, and lists and dicts of these. Tuples
become lists, sets become sorted lists and enums their values, so that no order of hashing can reach
a key. Values that vary per run or per place are refused. They are recognized by shape and name
only: comparing with this process's id would sometimes refuse an unrelated number.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

from ...errors import InvalidFactor

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 32


class Stable(str):
    """Text that is stable by construction, such as the description of a value: never refused."""


class StableTexts(dict[str, str]):
    """Stable texts by name; the names are stable as well and are not checked."""


_PLACE = re.compile(
    r"""(?:^|[\s=:,;'"(\[]|-[IL])(?:file://|~?/[^/\s]|~$|[A-Za-z]:[\\/]|\\\\\w)""",
)
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_SUSPECT = re.compile(r"[/~\\]|0x|-")
"""In each text that holds a place, an address or a UUID; most texts of a key hold none of these."""
_PER_RUN = {"pid", "ppid", "run_id", "worker_id", "instance_id", "uuid", "timestamp"}
_PER_PLACE = {"hostname", "host_name", "cwd", "tmpdir"}


def canonical(value: Json) -> bytes:
    """The one JSON encoding of `value`: sorted keys, no spaces, ASCII, no NaN."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
    return text.encode("ascii")


def is_place(text: str) -> bool:
    """Whether `text` holds an absolute path (POSIX, Windows, `~` or `file://`)."""
    return _PLACE.search(text) is not None


def varies_per_run(text: str) -> bool:
    """Whether `text` holds a UUID or a memory address."""
    return _UUID.search(text) is not None or _ADDRESS.search(text) is not None


def plain(name: str, value: Any, depth: int = 0) -> Json:
    """`value` as plain data, fit for `canonical`.

    Raises InvalidFactor, naming the factor by its dotted `name`, for anything that is not plain
    data or that differs between two runs or two machines that would compile the same code.
    """
    if isinstance(value, StableTexts):
        return {str(part): str(text) for part, text in value.items()}
    if isinstance(value, Stable):
        return str(value)
    if depth > MAX_DEPTH:
        raise _refused(name, "it is nested too deeply", "Give a digest of it instead")
    if isinstance(value, Enum):
        return plain(name, value.value, depth + 1)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(name, f"{value} has no JSON form", "Use null or a string instead")
        return value
    if isinstance(value, str):
        return _stable(name, value)
    if isinstance(value, list | tuple):
        return [plain(f"{name}[{i}]", item, depth + 1) for i, item in enumerate(value)]
    if isinstance(value, set | frozenset):
        return sorted((plain(name, item, depth + 1) for item in value), key=canonical)
    if isinstance(value, Mapping):
        return {
            _field(name, key): plain(f"{name}.{key}", item, depth + 1)
            for key, item in value.items()
        }
    reason = f"a {type(value).__qualname__} is not plain data"
    raise _refused(name, reason, "Give numbers, strings, lists and dicts only")


def _stable(name: str, text: str) -> str:
    if not _SUSPECT.search(text):
        return text
    if is_place(text):
        raise _refused(name, f"{text!r} is a place", "Give the content's digest or a version")
    if _ADDRESS.search(text):
        raise _refused(name, f"{text!r} holds a memory address", "Give a name that lasts")
    if _UUID.search(text):
        raise _refused(name, f"{text!r} differs for each run or device", "Leave it out")
    return text


def _field(name: str, key: Any) -> str:
    if not isinstance(key, str):
        raise _refused(name, f"its field {key!r} is not named by a string", "Use string names")
    if key.rpartition(".")[2].lower() in _PER_RUN | _PER_PLACE:
        raise _refused(f"{name}.{key}", "by its name it varies per run or place", "Leave it out")
    return _stable(name, key)


def _refused(name: str, reason: str, remedy: str) -> InvalidFactor:
    return InvalidFactor(name=name, reason=reason, remedy=remedy)
