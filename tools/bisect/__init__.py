"""Finds the part of the library that causes a wrong result, and checks of a case.

See docs/debugging.md.
"""

from ..steps import Step
from .case import BisectCase, Finding
from .invariance import Invariance, check_invariance
from .key_check import MissingFromKey, check_keys
from .search import bisect, reproduce

__all__ = [
    "BisectCase",
    "Finding",
    "Invariance",
    "MissingFromKey",
    "Step",
    "bisect",
    "check_invariance",
    "check_keys",
    "reproduce",
]
