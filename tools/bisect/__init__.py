"""Finds the part of the library that causes a wrong result; see docs/bisect.md."""

from .case import BisectCase, Step
from .finding import Finding
from .search import bisect, reproduce

__all__ = ["BisectCase", "Finding", "Step", "bisect", "reproduce"]
