"""Finds where a wrong number is made; see docs/bisect.md."""

from .bisect import bisect
from .finding import Finding
from .script import reproduce
from .subject import Step, Subject

__all__ = ["Finding", "Step", "Subject", "bisect", "reproduce"]
