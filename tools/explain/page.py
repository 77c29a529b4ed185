"""The page: the sections through a template, with everything it needs inside it."""

from __future__ import annotations

import re
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from ..report.sections import size
from .sections import sections

Facts = dict[str, Any]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def _with_code(text: str) -> Markup:
    """Text with backtick-quoted parts as code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))


def page(facts: Facts) -> str:
    """One self-contained HTML document without scripts and without anything loaded from outside."""
    templates = Environment(
        loader=PackageLoader("piecegraph.tools.explain"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {"size": size, "percent": _percent, "code": _with_code}
    templates.filters |= filters
    return templates.get_template("explain.html").render(facts, sections=sections(facts))
