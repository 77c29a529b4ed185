"""For all rooms: what earlier tests left on the heap does not slow the collections of later ones.

A capture session collects garbage, and with all of torch's compilers loaded that takes a second.
"""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def young_heap() -> None:
    gc.collect()
    gc.freeze()
