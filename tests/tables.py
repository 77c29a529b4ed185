"""Tables of cases in a TOML file beside the test file that reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def tables_of(test_file: str) -> dict[str, Any]:
    """Those of `test_x.toml`, for the `__file__` of `test_x.py`."""
    return tomllib.loads(Path(test_file).with_suffix(".toml").read_text())
