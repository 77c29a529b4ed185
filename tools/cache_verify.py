"""Verify a cache directory: the faults of its entries and blobs, as `piecegraph cache verify`."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from operator import or_
from pathlib import Path

from ..cache import Miss
from ..cache.directory import DirectoryLayer
from ..cache.files import check_private
from ..cache.layers import find
from ..cache.manifest import is_intact
from ..cache.names import blob_names, entry_names, is_digest, is_name
from ..cache.signing import trust_all
from ..errors import UntrustedDirectory


class Status(IntFlag):
    """Exit statuses of `cache verify`, those of `nix store verify`; they are summed."""

    CLEAN = 0
    CORRUPT = 1
    UNTRUSTED = 2
    UNVERIFIABLE = 4


@dataclass(frozen=True, slots=True)
class Defect:
    """One fault; `name` is relative to the directory."""

    status: Status
    name: str
    reason: str


def verify(root: Path) -> list[Defect]:
    """The faults of all entries and blobs under `root`, which must be private; changes nothing."""
    defects, layer = list(_check_openness(root)), DirectoryLayer(root, trust_all)
    try:
        for name in entry_names(root):
            defects += _check_entry(layer, name)
        for name in blob_names(root):
            if not is_intact(name, root / name):
                defects.append(Defect(Status.CORRUPT, name, "not the bytes of its name"))
    except OSError as error:
        defects.append(Defect(Status.UNVERIFIABLE, ".", str(error)))
    return defects


def exit_status(defects: Iterable[Defect]) -> int:
    """The statuses that occur, summed."""
    return int(functools.reduce(or_, (defect.status for defect in defects), Status.CLEAN))


def _check_openness(root: Path) -> Iterator[Defect]:
    try:
        check_private(Path(os.path.realpath(root)))
    except UntrustedDirectory as error:
        yield Defect(Status.UNTRUSTED, ".", str(error))
    except OSError as error:
        yield Defect(Status.UNVERIFIABLE, ".", str(error))


def _check_entry(layer: DirectoryLayer, name: str) -> list[Defect]:
    _, kind, prefix, digest = name.split("/")
    if not is_name(kind) or not is_digest(digest) or prefix != digest[:2]:
        return [Defect(Status.UNVERIFIABLE, name, "no entry has this name")]
    result = find(layer, kind, digest)
    if not isinstance(result, Miss) or result.reason == "aside":
        return []
    # it may be absent because it was removed since it was listed
    status = _STATUS.get(result.reason, Status.UNVERIFIABLE)
    return [Defect(status, name, result.detail)]


_STATUS = {"damaged": Status.CORRUPT, "untrusted": Status.UNTRUSTED}
