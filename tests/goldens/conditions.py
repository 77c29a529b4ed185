"""What becomes of each case of the condition suite, as a line of text."""

from __future__ import annotations

import hashlib
import re
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest

from ..compile.conditions import test_conditions
from ..compile.conditions.cases import sources, unread_sources
from ..compile.conditions.test_adversary import ADVERSARY, write

SAMPLE_EVERY = 16
"""Of the cases in the order of their names."""
LONGEST = 400
"""Characters of a reason; of a longer one a hash of the whole follows."""

CASES = {**sources(), **unread_sources(), **ADVERSARY}
NOT_ALONE = {"global_pre_hook"}
"""Their reason has a number that torch counts up in the process, so that cases before change it."""
SAMPLE = frozenset(sorted(CASES)[::SAMPLE_EVERY]) - NOT_ALONE


def outcomes(names: Collection[str] = CASES.keys()) -> list[str]:
    """Of each case by name: hit, or refused, another key or not cached with the reason."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        base = Path(folder)
        write({name: CASES[name] for name in names}, base, patch)
        cold, changed, unchanged = (
            test_conditions.starts(bundle, base / variant, base / "cache")
            for bundle, variant in (("use", "first"), ("force", "second"), ("force", "moved"))
        )
    return [
        f"{name}: {_outcome(name, cold[name], changed[name], unchanged[name])}"
        for name in sorted(names)
    ]


def _outcome(
    name: str, cold: dict[str, Any], changed: dict[str, Any], unchanged: dict[str, Any]
) -> str:
    """Of one case: its first start, that of the changed model, and that of an equal one."""
    if errors := [start["error"] for start in (cold, changed, unchanged) if "error" in start]:
        text = f"error: {errors[0]}"
    elif cold["not_kept"]:
        text = f"not cached: {cold['not_kept']}"
    elif not unchanged["hit"]:
        text = f"WRONG, a miss of an equal model: {unchanged['reason']}"
    elif changed["hit"]:
        text = "hit" if changed["right"] else "STALE HIT"
    else:
        text = changed["reason"].strip().replace("absent:", "another key:", 1)
    return _normalized(text.replace(f"case_{name}", "case"))


def _normalized(text: str) -> str:
    """Without folders, and without hashes of code and lines of Python's own, which are of its
    version."""
    text = re.sub(r"/\S+/(?:first|second|moved)/\w+/", "", text)
    text = re.sub(r"<code [0-9a-f]+>", "<code>", text)
    text = re.sub(r"(<frozen \w+>):\d+", r"\1", text)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"
