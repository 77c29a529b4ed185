"""How much of the package reaches into each ring around its core. The numbers may only fall.

A ring is what the core can do without: its modules, given by prefixes. Counted are the files
outside of it that import from it, and the names that they import, counted in each file.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import NamedTuple

import pytest


class Ring(NamedTuple):
    """The files outside that import from it, the names that they import, and what it is."""

    files: int
    names: int
    prefixes: str
    """Of modules, between spaces."""


RINGS = {
    "observers": Ring(53, 91, "events runtime.core.records runtime.core.report runtime.core.usage"),
    "log": Ring(1, 3, "runtime.parts.log"),
    "conditions": Ring(21, 51, "compile.conditions torch_compat.tracing.inlined"),
    "step checks": Ring(1, 1, "runtime.parts.checks"),
    "ranks": Ring(1, 2, "runtime.parts.ranks"),
    "guards": Ring(17, 34, "compile.guards"),
    "untraced": Ring(
        9, 11, "compile.eager_model compile.trace.inline_regions torch_compat.compiling.regions"
    ),
    "regions": Ring(1, 1, "runtime.parts.regions"),
    "proof": Ring(1, 2, "runtime.parts.proof"),
    "workers": Ring(
        5,
        15,
        "compile.backends.in_workers compile.backends.schedule compile.backends.worker "
        "compile.backends.workers",
    ),
    "strategies and memory": Ring(1, 2, "runtime.parts.strategies"),
    "shared cache": Ring(12, 49, "cache.layers cache.lease cache.remote cache.signing"),
    "emulation": Ring(3, 7, "runtime.backends.replay"),
    "service": Ring(1, 4, "runtime.parts.starts"),
    "seal": Ring(1, 1, "runtime.parts.seal"),
    "buckets": Ring(3, 22, "dispatch.buckets"),
}
"""One file imports from each `runtime.parts` folder: assemble.py."""


def within(module, prefixes):
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def imports(source, text):
    """Full names, without `piecegraph`, of what a file of the package imports: `events.Events`.

    `source` is the file's name relative to the package.
    """
    package = Path(source).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("piecegraph.")
                for alias in node.names
                if alias.name.startswith("piecegraph.")
            )
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                above = package[: len(package) + 1 - node.level]
                module = ".".join([*above, *filter(None, [module])])
            elif module.partition(".")[0] == "piecegraph":
                module = module.removeprefix("piecegraph").removeprefix(".")
            else:
                continue
            yield from (f"{module}.{alias.name}".lstrip(".") for alias in node.names)


def module_name(source):
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@pytest.fixture(scope="module")
def imported(package_sources):
    """What each file imports."""
    return {
        source: [*imports(source, path.read_text())] for source, path in package_sources.items()
    }


@pytest.mark.parametrize("name", RINGS)
def test_no_more_of_the_package_reaches_into_a_ring(imported, package_sources, name):
    ring, prefixes = RINGS[name], RINGS[name].prefixes.split()
    for prefix in prefixes:
        assert any(within(module_name(source), [prefix]) for source in package_sources), prefix
    reaching = {
        source: inside
        for source, names in imported.items()
        if not within(module_name(source), prefixes)
        and (inside := [each for each in names if within(each, prefixes)])
    }
    files, imported_names = len(reaching), sum(map(len, reaching.values()))
    shown = "\n".join(f"  {source}: {', '.join(names)}" for source, names in reaching.items())
    if files > ring.files or imported_names > ring.names:
        pytest.fail(
            f"{files} files reach into {name} with {imported_names} names; they may be"
            f" {ring.files} with {ring.names}:\n{shown}",
            pytrace=False,
        )
    if files < ring.files or imported_names < ring.names:
        pytest.fail(f"less reaches into {name}: write {files}, {imported_names}", pytrace=False)


@pytest.mark.parametrize(
    ("source", "text", "names"),
    [
        (
            "runtime/prepare.py",
            "from ..events import Events, Span",
            ["events.Events", "events.Span"],
        ),
        ("runtime/parts/log/a.py", "from ...core import usage", ["runtime.core.usage"]),
        ("public.py", "from . import events", ["events"]),
        ("tools/__init__.py", "from .engine.lora import Lora", ["tools.engine.lora.Lora"]),
        ("tools/a.py", "from piecegraph.events import Events", ["events.Events"]),
        ("tools/a.py", "import os, piecegraph.events", ["events"]),
        ("tools/a.py", "from json import loads", []),
        ("tools/a.py", "def f():\n    from ..cache.lease import Lease", ["cache.lease.Lease"]),
    ],
)
def test_imports_are_resolved(source, text, names):
    assert [*imports(source, text)] == names
