"""A check: what a step must satisfy before it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..forward_context import ForwardContext

CheckStep = Callable[[ForwardContext, tuple[Any, ...]], None]
"""Given the context of the step and its input tensors. Raises an error of our tree."""


class Check(NamedTuple):
    """`call` runs before each step; `often` says what it looks at each time, if not at all of it.

    Example: `Check("autocast", no_autocast)`.
    """

    name: str
    call: CheckStep
    often: str = "each step"
