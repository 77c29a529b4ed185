"""Guards of Dynamo as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

SHARED_CELL = "SHARED_CELL"
"""Kind of the fact that a variable of an enclosing function is the same at two expressions."""

CLASS_CHECK = "CLASS_CHECK"
"""Kind of the fact that a value was checked against classes: by which function, which classes."""

CALLED = "CALLED"
"""Kind of the fact that a function was called while tracing, without being traced."""

FALLBACK = "FALLBACK"
"""Kind of the fact that `__getattr__` answered for an attribute, which is called for what neither
the value nor its class has."""

UNGUARDED = "UNGUARDED"
"""Kind of the fact that Dynamo read a value and added no guard on it."""


@dataclass(frozen=True)
class GuardFact:
    """One guard of Dynamo: an expression over `L` and `G`, and what is checked of its value."""

    expression: str
    kind: str
    argument: Any = None
    """The attribute or key that the guard is about, or the other expression of an object."""
    where: str | None = None
    """file:line of the user's code that made Dynamo add it."""
