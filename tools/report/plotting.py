"""Where pictures come from: matplotlib, if it is there."""

from __future__ import annotations

from typing import Any

from ...errors import ToolMissing


def figure_class() -> Any:
    """matplotlib's Figure; raises ToolMissing without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ToolMissing(name="matplotlib", extra="tools") from None
    return Figure
