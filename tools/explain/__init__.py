"""Explains a startup and a run: as a page, as Markdown, as JSON. See docs/debugging.md."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...runtime.prepared_model import PreparedModel


def explain(prepared: PreparedModel, format: str = "html") -> str:
    """The explanation of `prepared` so far, as `html`, `md` or `json`. Needs the extra `cli`.

    It contains spans and the source of each piece; the factors of cache keys only if the model was
    prepared with `events=Events(detailed=True)`. Raises InvalidSetting for another format.
    """
    from ...config import check_choice
    from ..report.origin import origin
    from .collect import collect

    form = format.casefold()
    check_choice(FORMATS, "format", form, "there is no such choice")
    return rendered(collect({**origin(), **prepared.report()}, prepared), form)


def compared(facts: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
    """`facts` with what differs from `old`, which `explain(prepared, "json")` gave."""
    from .against import differences

    about = {name: old.get(name) for name in ("created", "command")}
    return {**facts, "against": {**about, "differences": differences(old, facts)}}


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
    return _page(facts)


def _page(facts: dict[str, Any]) -> str:
    """One self-contained HTML document without scripts and without anything loaded from outside."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    from ..report.sections import size
    from .sections import sections

    def with_code(text: str) -> Markup:
        """Text with backtick-quoted parts as code."""
        return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))

    templates = Environment(
        loader=PackageLoader("piecegraph.tools.explain"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters: dict[str, Any] = {
        "size": size,
        "percent": lambda share: f"{100 * share:.2f}%",
        "code": with_code,
        "breakable": lambda name: escape(name).replace("_", Markup("_<wbr>")),
    }
    templates.filters |= filters
    return templates.get_template("explain.html").render(facts, sections=sections(facts))
