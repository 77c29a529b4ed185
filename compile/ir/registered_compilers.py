"""Compilers of other packages, by the entry points that name them."""

from __future__ import annotations

from importlib.metadata import entry_points

from ...errors import CompilerUnversioned
from .compilation import Compiler

ENTRY_POINTS = "piecegraph.compilers"
BUILT_IN = ("inductor", "eager")
"""No entry point replaces these. Their version is that of torch."""


def registered_names() -> list[str]:
    """Names of the entry points."""
    return [point.name for point in entry_points(group=ENTRY_POINTS)]


def registered_compiler(name: str) -> Compiler | None:
    """The `Compiler` that the entry point `name` refers to; None if there is no such entry point.

    Raises CompilerUnversioned.
    """
    if name in BUILT_IN:
        return None
    for point in entry_points(group=ENTRY_POINTS):
        if point.name == name:
            compiler: Compiler = point.load()
            if compiler.load is not None and not compiler.version:
                raise CompilerUnversioned(name=name, group=ENTRY_POINTS)
            return compiler
    return None
