"""The page: the sections through a template, with everything it needs inside it."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ..report.sections import size
from .sections import sections

Facts = dict[str, Any]


def page(facts: Facts) -> str:
    """One self-contained HTML document without scripts and without anything loaded from outside."""
    templates = Environment(
        loader=PackageLoader("piecegraph.tools.explain"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"size": size, "percent": lambda share: f"{100 * share:.2f}%"}
    return templates.get_template("explain.html").render(facts, sections=sections(facts))
