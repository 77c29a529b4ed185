"""docs/config.md lists every setting once, with the default it has and all choices."""

import re
from enum import Enum
from pathlib import Path

import piecegraph
from piecegraph.settings import is_object

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "config.md").read_text()
PARTS = {piecegraph.Config: PAGE.partition("## Objects")[0]} | {
    getattr(piecegraph, name): text
    for name, text in re.findall(
        r"^\| \*\*`.*?(\w+)\(\.\.\.\).*?$(.*?)(?=^\| \*\*|\Z)", PAGE, re.M | re.S
    )
}
"""The rows of each class of settings."""

ROWS = [
    (part, *row)
    for part, text in PARTS.items()
    for row in re.findall(r"^\| `([a-z_]+)` \| (?:`([^`]+)`)? ?\| (.+) \|$", text, re.M)
]


def test_every_setting_is_listed_once():
    listed = [(part, name) for part, name, _, _ in ROWS]
    fields = [
        (part, name)
        for part in PARTS
        for name, field in part.model_fields.items()
        if not is_object(field.annotation)
    ]
    assert listed == fields
    objects = {f.annotation for f in piecegraph.Config.model_fields.values()} & PARTS.keys()
    assert len(objects) == 6


def test_the_default_is_the_one_it_has():
    for part, name, default, text in ROWS:
        field = part.model_fields[name]
        actual = field.get_default(call_default_factory=True)
        if isinstance(actual, Enum):
            actual = actual.value if isinstance(actual, str) else actual.name
        assert default == ("" if field.is_required() else repr(actual)), name
        assert text, name
        if isinstance(field.default, Enum) and isinstance(field.default, str):
            assert all(f'"{choice.value}"' in text for choice in type(field.default)), name
