"""How much of the package reaches into each ring around its core. The numbers may only fall.

A ring is what the core can do without: its modules, given by prefixes. Counted are the files
outside of it that import from it, and the names that they import, counted in each file.
"""

import ast
from pathlib import Path

import pytest

from tests.tables import tables_of

TABLES = tables_of(__file__)
RINGS = TABLES["rings"]


def within(module, prefixes):
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)


def imports(source, text):
    """Full names, without `piecegraph`, of what a file of the package imports: `events.Events`.

    `source` is the file's name relative to the package.
    """
    package = Path(source).parent.parts
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("piecegraph.")]
            yield from (name.removeprefix("piecegraph.") for name in names)
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
    allowed, prefixes = RINGS[name], RINGS[name]["modules"]
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
    if files > allowed["files"] or imported_names > allowed["names"]:
        pytest.fail(
            f"{files} files reach into {name} with {imported_names} names; they may be"
            f" {allowed['files']} with {allowed['names']}:\n{shown}",
            pytrace=False,
        )
    if files < allowed["files"] or imported_names < allowed["names"]:
        pytest.fail(f"less reaches into {name}: write {files}, {imported_names}", pytrace=False)


@pytest.mark.parametrize(("source", "text", "names"), TABLES["imports"])
def test_imports_are_resolved(source, text, names):
    assert [*imports(source, text)] == names
