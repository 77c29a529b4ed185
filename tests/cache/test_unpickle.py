"""Only what is listed can be built, and nothing else is so much as imported."""

from __future__ import annotations

import collections
import fractions
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

from piecegraph.cache.unpickle import unpickle
from piecegraph.errors import ForbiddenPickle

ALLOWED = {("collections", "OrderedDict"), ("fractions", "Fraction")}


def test_listed_classes_and_plain_data_load() -> None:
    value = [collections.OrderedDict(a=fractions.Fraction(1, 3)), {"x": (1, b"2", None)}]
    assert unpickle(pickle.dumps(value), ALLOWED) == value


class Calls:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_payloads_are_refused_before_they_run(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "executed"
    for call in (Calls(os.system, f"touch {mark}"), Calls(eval, "1"), Calls(Path.touch, mark)):
        with pytest.raises(ForbiddenPickle, match="nothing was executed"):
            unpickle(pickle.dumps([fractions.Fraction(1), call], protocol), ALLOWED)
    assert not mark.exists()


def test_unlisted_modules_are_not_imported() -> None:
    assert "antigravity" not in sys.modules
    with pytest.raises(ForbiddenPickle, match=r"antigravity\.x"):
        unpickle(b"cantigravity\nx\n.", ALLOWED)
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["OrderedDict.fromkeys", "abc", "_sys"])
def test_what_hangs_on_a_listed_module_is_not_listed(name: str) -> None:
    content = b"\x80\x04\x8c\x0bcollections\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    with pytest.raises(ForbiddenPickle):
        unpickle(content, ALLOWED)


def test_persistent_ids_are_refused() -> None:
    with pytest.raises(ForbiddenPickle, match="persistent"):
        unpickle(b"Px\n.", ALLOWED)
