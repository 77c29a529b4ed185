"""The page: the facts through a template, with everything it needs inside it."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from ..report.tables import size
from .picture import picture

Facts = dict[str, Any]


def page(facts: Facts) -> str:
    """One self-contained HTML document: no script, no font, no picture from elsewhere."""
    templates = Environment(
        loader=PackageLoader("piecegraph.tools.explain"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"size": size, "seconds": _seconds, "share": _share}
    end = max((span["start"] + span["seconds"] for span in facts["timeline"]), default=1.0)
    return templates.get_template("explain.html").render(
        facts, end=end or 1.0, picture=Markup(picture(facts["steps"])), hottest=_hottest(facts)
    )


def _hottest(facts: Facts) -> int:
    return max((n for row in facts["heat"]["rows"] for n in row["counts"]), default=1) or 1


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(value: float) -> str:
    return f"{value:.1%}"
