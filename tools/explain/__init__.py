"""Explains a startup and a run: as a page, as Markdown, as JSON. See docs/explain.md."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...runtime.prepared_model import PreparedModel


def explain(prepared: PreparedModel, format: str = "html") -> str:
    """The explanation of `prepared` so far, as `html`, `md` or `json`. Needs the extra `cli`.

    It contains spans and the source of each piece; the factors of cache keys only if the model was
    prepared with `events=Events(detailed=True)`. Raises InvalidSetting for another format.
    """
    from ..serve.options import choice
    from ..serve.report import origin
    from .collect import collect

    form = choice("format", format, FORMATS)
    return rendered(collect({**origin(), **prepared.report()}, prepared), form)


FORMATS = ("html", "json", "md")


def rendered(facts: dict[str, object], form: str) -> str:
    """The facts in one of FORMATS."""
    if form == "json":
        return json.dumps(facts, indent=2, default=str) + "\n"
    if form == "md":
        from ..report.sections import as_markdown
        from .sections import sections

        title = "# piecegraph: startup and run explained"
        return "\n\n".join([title, *map(as_markdown, sections(facts))]) + "\n"
    from .page import page

    return page(facts)
