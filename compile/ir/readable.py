"""Graphs as text for people: Python source with dtypes, shapes and the user's lines.

Directories are cut from the comments that name those lines, so that the text, which is kept in
bundles, is the same wherever the model lies.
"""

from __future__ import annotations

import re

from torch.fx import GraphModule

_PLACE = re.compile(r"# File: (?:[^:\n]*/)?([^/:\n]+:\d+)")


def readable(graph: GraphModule) -> str:
    """The source of `graph`, annotated."""
    return _PLACE.sub(r"# \1", graph.print_readable(print_output=False))
