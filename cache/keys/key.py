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
        return f"{self.name}: {_shown(self.old)} -> {_shown(self.new)}"


def diff(old: Mapping[str, Json], new: Mapping[str, Json]) -> list[Difference]:
    """The factors that differ, by name; nested dicts are compared field by field."""
    before, after = dict(_flat("", old)), dict(_flat("", new))
    return [
        Difference(name, before.get(name, ABSENT), after.get(name, ABSENT))
        for name in sorted(before.keys() | after.keys())
        if name not in before or name not in after or not _same(before[name], after[name])
    ]


def _flat(prefix: str, factors: Mapping[str, Json]) -> Iterator[tuple[str, Json]]:
    for name, value in factors.items():
        if isinstance(value, dict) and value:
            yield from _flat(f"{prefix}{name}.", value)
        else:
            yield prefix + name, value


def _same(old: Json, new: Json) -> bool:
    """Equal as keys see it: `1`, `1.0` and `true` are three values."""
    return canonical(old) == canonical(new)


def _shown(value: Json | Absent) -> str:
    return value.value if isinstance(value, Absent) else json.dumps(value)
