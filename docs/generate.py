"""Write docs/config.md and docs/api.md from docstrings, and the numbers of README.md from recorded
results: `python docs/generate.py`."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import piecegraph
from piecegraph import CacheSettings, Config, Delayed, LayerConfig, Lazy, Shadow
from piecegraph.settings import Settings, field_docstrings, is_object

DOCS = Path(piecegraph.__file__).parent / "docs"

LAYERS = 32
"""Of the starts in the README."""

NAMES = {
    "Prepare a model": ("prepare", "compile_ahead", "SWITCHES", "switched_off"),
    "Settings": (
        "Config", "Tracing", "Codegen", "Sizes", "Variants", "Attention", "Steps", "Shadow",
        "Eager", "Delayed", "Lazy", "CacheSettings", "LayerConfig", "GraphPass", "Axis",
        "PaddingLimit",
    ),
    "Serve": (
        "PreparedModel", "Batch", "Decision", "Reason", "ForwardContext", "forward_context",
        "get_forward_context", "break_graph", "AuxiliaryTask", "Ranks",
    ),
    "Dispatch": (
        "GraphMode", "RuntimeMode", "AttentionSupport", "BatchDescriptor", "DispatchPlan",
        "Dispatcher",
    ),
    "Explain": (
        "Events", "backend_report", "explain_miss", "CacheForecast", "cache_root", "MemoryPlan",
        "PiecegraphError", "errors", "__version__",
    ),
    "Observe steps": ("StepObserver", "LoggedStep"),
    "Test without a GPU": ("ReplayBackend", "ReplayOptions"),
}  # fmt: skip
"""The public names by section of docs/api.md."""

TOOLS = {
    "piecegraph.tools.explain": ("explain",),
    "piecegraph.tools.steps": ("StepRecorder", "Step", "load_steps", "replay_step"),
}
"""The public names of tools, which the package does not import."""

OTHER_DOCS = {
    "SWITCHES": "Parts that can be turned off, with the settings that do it; docs/debugging.md.",
    "__version__": "The version of the package.",
}
"""Names whose values have no docstring."""


CONFIG_INTRO = """# Settings

`Config` holds all settings: those that nearly every program states, and objects with the others,
each for one part of the library. Choices may be given by name and objects as dicts:
`Config(strategy="lazy", tracing={"guards": "check"})`. `changed` makes a copy; a dict, or a dotted
name as on the command line (`--set tracing.guards=check`), changes only what it names. Unknown
names and invalid values are errors when a `Config` is made. Parts can be turned off from the
command line or the environment: [debugging.md](debugging.md). This page is generated from the
docstrings by `docs/generate.py`.
"""

API_INTRO = """# Public names

All names of `piecegraph`, imported on first use. Other modules are internal, except
`piecegraph.dispatch` (policy without torch), `piecegraph.tools.bisect.pieces` (pieces as graphs),
`piecegraph.tools.integrations` and those at the end of the table. This page is generated from the
docstrings by `docs/generate.py`.
"""


_HEAD = "| setting | default | meaning |", "|---|---|---|"


def config_page() -> str:
    fields = Config.model_fields
    objects = {n: f.annotation for n, f in fields.items() if is_object(f.annotation)}
    common = _rows(Config, [name for name in fields if name not in objects])
    top = _section("Common settings", *_HEAD, *common)
    parts = [
        ("`strategy=Delayed(...)`", Delayed),
        ("`strategy=Lazy(...)`", Lazy),
        ("`cache=CacheSettings(...)`", CacheSettings),
        ('`cache={"layers": (LayerConfig(...),)}`', LayerConfig),
        ("`shadow=Shadow(...)`", Shadow),
        *((f"`{name}={part.__name__}(...)`", part) for name, part in objects.items()),
    ]
    rows = list[str]()
    for title, part in parts:
        rows += [f"| **{title}** | | {_summary_of(part)} |", *_rows(part, list(part.model_fields))]
    objects = _section("Objects", *_HEAD, *rows)
    return "\n".join([CONFIG_INTRO, top, objects])


def _rows(part: type[Settings], names: list[str]) -> list[str]:
    return [f"| `{name}` | {_default(part, name)} | {_meaning(part, name)} |" for name in names]


def api_page() -> str:
    rows, settings = list[str](), config_page()
    for title, names in NAMES.items():
        rows += [f"| **{title}** | |"]
        objects = [name for name in names if f"={name}(" in settings]
        if objects:
            rows += [f"| {', '.join(f'`{name}`' for name in objects)} | [config.md](config.md) |"]
        rows += [f"| `{n}` | {_summary(piecegraph, n)} |" for n in names if n not in objects]
    for module, names in TOOLS.items():
        rows += [f"| **`{module}`** | |"]
        rows += [f"| `{n}` | {_summary(importlib.import_module(module), n)} |" for n in names]
    return "\n".join([API_INTRO, _section("Names", "| name | what it is |", "|---|---|", *rows)])


def _section(title: str, *rows: str) -> str:
    return "\n".join([f"## {title}", "", *rows, ""])


def _default(part: type[Settings], name: str) -> str:
    field = part.model_fields[name]
    if field.is_required():
        return ""
    value: Any = field.get_default(call_default_factory=True)
    return f"`{getattr(value, 'value', value)!r}`"


def _meaning(part: type[Settings], name: str) -> str:
    text = " ".join(field_docstrings(part)[name].split())
    return re.sub(r"docs/(\w+\.md)", r"[\1](\1)", text)


def _summary_of(part: type[Settings]) -> str:
    return " ".join(part.__doc__.partition("\n\n")[0].split())


def _summary(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    text = OTHER_DOCS.get(name) or inspect.getdoc(value) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters.values()
        plain = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
        summary = f"`{inspect.Signature(plain)}` {summary}"
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", summary)


STARTS = {
    "compile_cold": "`torch.compile`, cold",
    "compile_warm": "`torch.compile`, warm",
    "compile_regional": "`torch.compile` of each layer (regional), cold",
    "cold": "piecegraph, cold",
    "warm": "piecegraph, warm",
    "warm_ahead": "piecegraph, warm, with libraries built ahead of time",
}
"""The rows of the README, by the way to start in the recorded result."""


def _starts() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The recorded starts, and their rows by way."""
    recorded = json.loads((DOCS.parent / "benchmarks/starts-cpu.json").read_text())
    rows = recorded["result"]["rows"]
    return recorded, {each["way"]: each for each in rows if each["layers"] == LAYERS}


def readme() -> str:
    """README.md with the numbers of the recorded starts."""
    recorded, rows = _starts()
    before = [each["import_torch"] + each["model"] for each in rows.values()]
    table = [
        f"Seconds from a model of {LAYERS} layers that is built until it can serve, on"
        f" {recorded['machine']['cores']} CPU cores (torch {recorded['versions']['torch']},"
        f" {recorded['date']}, commit {recorded['commit'][:7]},"
        " [benchmarks/starts-cpu.json](benchmarks/starts-cpu.json)). Beside the table each start"
        f" imports torch and builds the model, which takes {min(before):.1f} to"
        f" {max(before):.1f} s in all of them:",
        *("", "| start | seconds |", "|---|---|"),
        *(f"| {title} | {_seconds(rows.get(way))} |" for way, title in STARTS.items()),
    ]
    text = (DOCS.parent / "README.md").read_text()
    return re.sub(r"(<!-- starts: .* -->\n).*(<!-- end of starts -->)", lambda found: "\n".join(
        [found[1].rstrip(), *table, found[2]]), text, flags=re.DOTALL)  # fmt: skip


def _seconds(row: dict[str, Any] | None) -> str:
    if row is None:
        return "not measured"
    return f"{row['ready']:.1f}" if row["ready"] > 1 else f"{row['ready']:.2f}"


PARTS_OF_A_START = {
    "import torch": ("import_torch",),
    "build the model": ("model",),
    "trace and split": ("trace", "split"),
    "compile": ("compile",),
    "load the bundle": ("look_up", "load"),
    "other": (),
}
SERVED = {"served": 'piecegraph, cold, with bundle="serve"'}
WIDTH, LEFT, BAR = 880, 370, 26


def starts_picture() -> str:
    """The recorded starts as bars, readable on light and dark pages."""
    recorded, rows = _starts()
    titles = {**STARTS, **SERVED}
    shown = {way: rows[way] for way in titles if way in rows}
    ends = {way: row["import_torch"] + row["model"] + row["ready"] for way, row in shown.items()}
    scale = (WIDTH - LEFT - 70) / max(ends.values())
    lines = []
    for place, (way, row) in enumerate(shown.items()):
        y, x = 34 + place * BAR, float(LEFT)
        title = titles[way].replace("`", "")
        lines.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{title}</text>')
        known = [sum(row.get(name) or 0.0 for name in names) for names in PARTS_OF_A_START.values()]
        for number, seconds in enumerate([*known[:-1], max(0.0, ends[way] - sum(known))]):
            width = seconds * scale
            lines.append(
                f'<rect class="p{number}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="18"/>'
            )
            x += width
        lines.append(f'<text x="{x + 6:.1f}" y="{y + 14}">{ends[way]:.1f} s</text>')
    for number, name in enumerate(PARTS_OF_A_START):
        x = 20 + number * 142
        lines.append(f'<rect class="p{number}" x="{x}" y="8" width="12" height="12"/>')
        lines.append(f'<text x="{x + 18}" y="18">{name}</text>')
    height = 44 + len(shown) * BAR + 18
    lines.append(
        f'<text x="20" y="{height - 12}">Seconds from the start of the process until it can serve,'
        f" {LAYERS} layers, {recorded['machine']['cores']} CPU cores, {recorded['date']}</text>"
    )
    return STYLED.format(width=WIDTH, height=height, body="\n".join(lines))


STYLED = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"\
 height="{height}" font-family="sans-serif" font-size="13" role="img">
<style>
svg {{ background: #fff }} text {{ fill: #223 }}
.p0 {{ fill: #9aa5b8 }} .p1 {{ fill: #c3cad6 }} .p2 {{ fill: #6aa84f }}
.p3 {{ fill: #3d85c6 }} .p4 {{ fill: #e69138 }} .p5 {{ fill: #8e7cc3 }}
@media (prefers-color-scheme: dark) {{ svg {{ background: #14171f }} text {{ fill: #dde3ee }} }}
</style>
{body}
</svg>
"""

PAGES = {
    "config.md": config_page,
    "api.md": api_page,
    "../README.md": readme,
    "starts.svg": starts_picture,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
