"""Changes that were thought of after the conditions were written: none gives a wrong number.

Process A stores a bundle, process B starts with the changed model on A's cache.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from . import test_conditions
from .cases import HEAD
from .cases.adversary import CASES

pytestmark = pytest.mark.heavy
NOT_CACHEABLE = {"subclasses_of_a_class", "shape_of_a_numpy_array"}


def test_no_change_is_a_stale_hit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {name: HEAD + source for name, source in CASES.items()}
    assert len(sources) >= 60
    monkeypatch.setattr(test_conditions, "sources", lambda: sources)
    monkeypatch.setattr(test_conditions, "unread_sources", dict)
    for variant, folder in enumerate(("first", "second")):
        test_conditions.write(tmp_path / folder, variant)
    cold, changed = (
        test_conditions.starts("use", tmp_path / folder, tmp_path / "cache")
        for folder in ("first", "second")
    )
    assert not [name for name in CASES if "error" in cold[name] or "error" in changed[name]]
    assert not [name for name in CASES if not (cold[name]["right"] and changed[name]["right"])]
    assert not [name for name in CASES if changed[name]["hit"]]
    assert {name for name in CASES if cold[name]["not_kept"]} == NOT_CACHEABLE
