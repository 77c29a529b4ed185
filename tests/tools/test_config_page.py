"""docs/config.md lists every setting once, with the default it has."""

from __future__ import annotations

import re
from enum import Enum
from pathlib import Path

import pytest

from piecegraph import Config

ROOT = Path(__file__).parents[2]
ROWS = re.findall(
    r"^\| `([a-z_]+)` \| `([^`]+)` \| (.+) \|$", (ROOT / "docs" / "config.md").read_text(), re.M
)


def test_every_setting_is_listed_once():
    assert sorted(name for name, _, _ in ROWS) == sorted(Config.model_fields)


@pytest.mark.parametrize(("name", "default", "text"), ROWS)
def test_the_default_is_the_one_it_has(name, default, text):
    actual = Config.model_fields[name].get_default(call_default_factory=True)
    if isinstance(actual, Enum):
        actual = actual.value if isinstance(actual, str) else actual.name
    assert default in (repr(actual), actual)
    assert text


def test_every_choice_is_named():
    texts = {name: text for name, _, text in ROWS}
    for name, field in Config.model_fields.items():
        if isinstance(field.default, Enum) and isinstance(field.default, str):
            assert all(f'"{choice.value}"' in texts[name] for choice in type(field.default))
