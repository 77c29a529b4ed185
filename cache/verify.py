"""Is everything in a directory what it claims to be? The answer of `cache verify`.

Exit statuses are those of `nix store verify`, summed: 0 clean, 1 corrupt, 2 untrusted,
4 unverifiable.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from ..errors import UntrustedDirectory
from .entries import Miss, find, is_intact
from .layers import SharedDirectory
from .listing import blob_names, entry_names
from .names import is_digest, is_name
from .signing import Trust, anybody
from .trust import check_private


class Status(IntFlag):
    CLEAN = 0
    CORRUPT = 1
    UNTRUSTED = 2
    UNVERIFIABLE = 4


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; `name` is relative to the directory."""

    status: Status
    name: str
    reason: str


def verify(root: Path, trust: Trust | None = None) -> list[Finding]:
    """What is wrong with the entries and blobs below `root`; changes nothing.

    Without `trust` the directory has to be private, with it every entry has to satisfy it.
    """
    findings = [] if trust is not None else list(_openness(root))
    place = SharedDirectory(root, trust or anybody)
    try:
        for name in entry_names(root):
            findings += _check_entry(place, name)
        for name in blob_names(root):
            if not is_intact(name, root / name):
                findings.append(Finding(Status.CORRUPT, name, "not the bytes of its name"))
    except OSError as error:
        findings.append(Finding(Status.UNVERIFIABLE, ".", str(error)))
    return findings


def exit_status(findings: Iterable[Finding]) -> int:
    """The statuses that occur, summed."""
    status = Status.CLEAN
    for finding in findings:
        status |= finding.status
    return int(status)


def _openness(root: Path) -> Iterator[Finding]:
    try:
        check_private(Path(os.path.realpath(root)))
    except UntrustedDirectory as error:
        yield Finding(Status.UNTRUSTED, ".", str(error))
    except OSError as error:
        yield Finding(Status.UNVERIFIABLE, ".", str(error))


def _check_entry(place: SharedDirectory, name: str) -> list[Finding]:
    _, kind, prefix, digest = name.split("/")
    if not is_name(kind) or not is_digest(digest) or prefix != digest[:2]:
        return [Finding(Status.UNVERIFIABLE, name, "no entry has this name")]
    found = find(place, kind, digest)
    return [Finding(_STATUS[found.reason], name, found.detail)] if isinstance(found, Miss) else []


_STATUS = {
    "damaged": Status.CORRUPT,
    "untrusted": Status.UNTRUSTED,
    "absent": Status.UNVERIFIABLE,  # removed since it was listed
    "incomplete": Status.UNVERIFIABLE,
    "unreadable": Status.UNVERIFIABLE,
}
