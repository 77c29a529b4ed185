"""Finds the part of the library that causes a wrong result.

See docs/debugging.md.
"""

from ..steps import Step
from .case import BisectCase, Finding
from .search import bisect, reproduce

__all__ = [
    "BisectCase",
    "Finding",
    "Step",
    "bisect",
    "reproduce",
]
