"""Keys: a full-length sha256 over named factors, and which factors set two keys apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..names import SCHEMA, checked_name
from .factors import Json, canonical, plain


class Absent(StrEnum):
    """Stands for the value of a factor that one of two keys does not have."""

    ABSENT = "<absent>"


ABSENT = Absent.ABSENT


VARIANT = "candidate"
"""The factor that separates entries whose other factors are equal; it explains no miss."""

SHOWN = 100
"""Characters of a value that a difference shows."""


@dataclass(frozen=True, slots=True)
class Key:
    """What an entry was made from. `kind` is "trace" or "codegen".

    `digest` is 64 hex digits; `encoded` holds the factors as canonical JSON, so that a key is
    immutable, hashable and cheap to compare.
    """

    kind: str
    digest: str
    encoded: str

    @classmethod
    def of(cls, kind: str, factors: Mapping[str, Any]) -> Key:
        """The key of `kind` over `factors`; raises InvalidFactor for what may not be in a key."""
        checked_name(kind, "kind of key")
        return cls._of_plain(kind, plain(kind, factors))

    def extended(self, factors: Mapping[str, Any]) -> Key:
        """The key over its own factors, which are not checked again, and these."""
        further: Any = plain(self.kind, factors)
        return self._of_plain(self.kind, {**self.factors, **further})

    @classmethod
    def _of_plain(cls, kind: str, factors: Json) -> Key:
        encoded = canonical(factors).decode("ascii")
        content = f'{{"factors":{encoded},"kind":"{kind}","schema":{SCHEMA}}}'  # canonical as well
        return cls(kind, hashlib.sha256(content.encode("ascii")).hexdigest(), encoded)

    @property
    def factors(self) -> dict[str, Json]:
        """A fresh copy of the factors."""
        factors: dict[str, Json] = json.loads(self.encoded)
        return factors


@dataclass(frozen=True, slots=True)
class Difference:
    """One factor, by dotted name, whose value differs between an old and a new key."""

    name: str
    old: Json | Absent
    new: Json | Absent

    def __str__(self) -> str:
        old, new = _shown(self.old), _shown(self.new)
        pairs = zip(old, new, strict=False)
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
        return f"{self.name}: {_around(old, same)} -> {_around(new, same)}"


def diff(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[Difference]:
    """The factors that differ, by name, down to the part that differs."""
    return list(_differences("", dict(old), dict(new)))


def _differences(name: str, old: Json | Absent, new: Json | Absent) -> Iterator[Difference]:
    before, after = _parts(old), _parts(new)
    if before is None or after is None or type(old) is not type(new):
        if isinstance(old, Absent) or isinstance(new, Absent) or canonical(old) != canonical(new):
            yield Difference(name, old, new)
        return
    for part in sorted(before.keys() | after.keys()):
        of = f"{name}.{part}" if name else part
        yield from _differences(of, before.get(part, ABSENT), after.get(part, ABSENT))
    if isinstance(old, list) and before.keys() == after.keys() and [*before] != [*after]:
        yield Difference(f"{name} in order", [*before], [*after])


def _parts(value: Json | Absent) -> dict[str, Json] | None:
    """The parts of a dict, and of a list of [name, value] pairs; None for what has no names."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list):
        pairs = [pair for pair in value if isinstance(pair, list) and len(pair) == 2]
        parts = {pair[0]: pair[1] for pair in pairs if isinstance(pair[0], str)}
        return parts if len(parts) == len(value) else None
    return None


def _shown(value: Json | Absent) -> str:
    return value.value if isinstance(value, Absent) else json.dumps(value)


def _around(text: str, place: int) -> str:
    """`text`, of a long one SHOWN characters around a place."""
    if len(text) <= SHOWN:
        return text
    start = max(0, min(place - SHOWN // 4, len(text) - SHOWN))
    return f"{'...' if start else ''}{text[start : start + SHOWN]}..."
