"""Write docs/config.md and docs/api.md from docstrings: `python docs/generate.py`."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import piecegraph
from piecegraph import Config
from piecegraph.compile.ir.settings import field_docstrings

DOCS = Path(piecegraph.__file__).parent / "docs"

SETTINGS = {
    "The model": (
        "inputs", "max_num_tokens", "min_num_tokens", "max_num_reqs", "symbol_limits",
        "splitting_ops", "splitting_patterns", "splitting_predicate", "attention_support", "traits",
    ),
    "Tracing and compiling": (
        "level", "compile", "compiler", "dynamic_shapes", "guards", "broken_guard",
        "compile_ranges", "compile_sizes", "dedupe", "use_inductor_graph_partition",
        "inductor_options", "pass_switches", "user_passes", "dump_dir", "cold",
    ),
    "Dispatch": (
        "query_len", "query_lens", "speculation_schedule", "max_loras", "lora_graphs", "axes",
        "capture_sizes", "size_alignment", "padding_limit",
        "buckets", "bucket_limits",
    ),
    "Graphs": (
        "graph_mode", "strategy", "captures_per_step", "memory_limit", "lazy_bytes",
        "padding", "graph_backend", "after_seal",
    ),
    "The cache": (
        "cache", "cache_dir", "cache_layers", "cache_bytes", "cache_age_days", "bundle",
    ),
}  # fmt: skip
"""The fields of `Config` by section of docs/config.md."""

NAMES = {
    "Prepare a model": (
        "prepare", "compile_ahead", "Config", "LayerConfig", "SWITCHES", "switched_off",
    ),
    "Serve": (
        "PreparedModel", "Batch", "Decision", "Reason", "ForwardContext", "forward_context",
        "get_forward_context", "break_graph", "AuxiliaryTask", "Ranks",
    ),
    "Dispatch": (
        "GraphMode", "RuntimeMode", "AttentionSupport", "ModelTraits", "CaptureStrategy",
        "PaddingLimit", "Axis",
        "BatchDescriptor", "DispatchPlan", "Dispatcher",
    ),
    "Explain": (
        "Events", "explain_miss", "CacheForecast", "cache_root", "MemoryPlan",
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

`Config` holds all settings. Unknown names and invalid values are errors when it is made. Choices
may be given by name: `Config(guards="check", graph_mode="PIECEWISE")`. Parts can be turned off from
the command line or the environment: [debugging.md](debugging.md#turn-parts-off). This page is
generated from the docstrings by `docs/generate.py`.
"""

API_INTRO = """# Public names

All names of `piecegraph`, imported on first use. Other modules are internal, except
`piecegraph.dispatch` (policy without torch), `piecegraph.compile.debug` (pieces as graphs),
`piecegraph.tools.integrations` and those of [Tools](#tools). This page is generated from the
docstrings by `docs/generate.py`.
"""


def config_page() -> str:
    sections = []
    for title, names in SETTINGS.items():
        rows = (f"| `{name}` | `{_default(name)}` | {_meaning(name)} |" for name in names)
        sections.append(_section(title, "| setting | default | meaning |", "|---|---|---|", *rows))
    return "\n".join([CONFIG_INTRO, *sections])


def api_page() -> str:
    sections = []
    for title, names in NAMES.items():
        rows = (f"| `{name}` | {_summary(piecegraph, name)} |" for name in names)
        sections.append(_section(title, "| name | what it is |", "|---|---|", *rows))
    tools = (
        f"| `{module}` | `{name}` | {_summary(importlib.import_module(module), name)} |"
        for module, names in TOOLS.items()
        for name in names
    )
    sections.append(_section("Tools", "| module | name | what it is |", "|---|---|---|", *tools))
    return "\n".join([API_INTRO, *sections])


def _section(title: str, *rows: str) -> str:
    return "\n".join([f"## {title}", "", *rows, ""])


def _default(name: str) -> str:
    value: Any = Config.model_fields[name].get_default(call_default_factory=True)
    return repr(getattr(value, "value", value))


def _meaning(name: str) -> str:
    text = " ".join(field_docstrings(Config)[name].split())
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text)


def _summary(module: ModuleType, name: str) -> str:
    value = getattr(module, name)
    text = OTHER_DOCS.get(name) or inspect.getdoc(value) or ""
    summary = " ".join(text.partition("\n\n")[0].split())
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", summary)


PAGES = {"config.md": config_page, "api.md": api_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
