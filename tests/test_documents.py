"""Links in documents have targets; benchmark results state the facts of their machine."""

import importlib
import json
import re
from pathlib import Path

import pytest
from typer.main import get_command

import piecegraph as pg
from piecegraph.settings import setting_names

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("[!.]*/README.md")]
CURRENT = [page for page in PAGES if page.name != "CHANGELOG.md"]
RESULTS = sorted((ROOT / "benchmarks").glob("*.json"))


def links(page):
    """Those into this project."""
    found = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [link for link in found if "://" not in link]


def of_pages(pages):
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


@of_pages(PAGES)
def test_links_lead_to_files_and_headings(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page):
    """The anchors that hosts derive from headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_a_benchmark_result_has_machine_facts(path):
    result = json.loads(path.read_text())
    assert {"benchmark", "commit", "date", "machine", "versions", "result", "note"} == {*result}
    assert {"cpu", "cores", "threads", "memory_gib", "load", "gpu", "system"} == {
        *result["machine"]
    }
    assert {"python", "torch", "triton", "piecegraph"} <= {*result["versions"]}
    assert result["result"].get("rows") or result["result"]["runs"]


def test_every_page_is_linked_from_another():
    linked = {
        (page.parent / link.partition("#")[0]).resolve() for page in PAGES for link in links(page)
    }
    assert [page for page in (ROOT / "docs").glob("*.md") if page.resolve() not in linked] == []


def test_the_pages_are_few_and_can_be_read():
    pages = list((ROOT / "docs").glob("*.md"))
    assert len(pages) <= 18
    assert sum(len(page.read_text().splitlines()) for page in pages) <= 3300


def test_every_method_of_a_prepared_model_is_described():
    page = (ROOT / "docs/reference.md").read_text()
    methods = [name for name in dir(pg.PreparedModel) if not name.startswith("_")]
    assert [name for name in methods if f"`{name}" not in page] == []


PROGRAMS = {
    "piecegraph": "piecegraph.tools.cli.app",
    "python -m benchmarks": "piecegraph.benchmarks.__main__",
}


def commands(page):
    """The commands of our programs that a page names, in a block or in a line."""
    text = page.read_text().replace("\\\n", " ")
    names = "|".join(PROGRAMS)
    named = re.findall(rf"^\$ ({names}) (.*)$", text, re.M)
    return named + re.findall(rf"`({names}) ([^`]+)`", text)


@of_pages([page for page in CURRENT if commands(page)])
def test_commands_of_a_page_exist_with_their_options(page):
    for program, rest in commands(page):
        command = get_command(importlib.import_module(PROGRAMS[program]).app)
        words = rest.partition(" -- ")[0].split()
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        context = command.make_context("page", [], resilient_parsing=True)
        known = {name for parameter in command.get_params(context) for name in parameter.opts}
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= known | {"--version"}, f"{program} {rest}"
        assert not hasattr(command, "commands") or not words or options, f"{program} {rest}"


SOURCE = "\n".join(
    path.read_text()
    for path in ROOT.rglob("*.py")
    if path.relative_to(ROOT).parts[0] not in ("docs", "tests")
    and not path.relative_to(ROOT).parts[0].startswith(".")
)
MAKEFILE = (ROOT / "Makefile").read_text()
FOLDERS = "tests|tools|runtime|compile|dispatch|cache|torch_compat|benchmarks|examples|docs"
NAMES = {
    r"\b(?:event|warning|counter)s? `([a-z_.]+)`": lambda name: f'"{name}"' in SOURCE,
    r"\b(PIECEGRAPH_[A-Z_]+)\b": lambda name: name in SOURCE,
    r"`make ([a-z-]+)": lambda name: re.search(rf"^{name}:", MAKEFILE, re.M),
    rf"`((?:{FOLDERS})/[\w/.-]+)`": lambda name: (ROOT / name).exists(),
    r"`([A-Z]\w+)` (?:names|says|lists)": lambda name: f"class {name}" in SOURCE,
}
"""What pages name, by the form in which they do, and whether there is such a thing."""


@of_pages(CURRENT)
def test_events_variables_targets_files_and_errors_that_a_page_names_exist(page):
    named = [
        (name, exists)
        for form, exists in NAMES.items()
        for name in re.findall(form, page.read_text())
    ]
    assert [name for name, exists in named if not exists(name)] == []


def test_pages_and_headings_that_the_package_names_exist():
    for heading, name in re.findall(r"(?:see (\w+) in )?docs/([\w-]+\.md)", SOURCE):
        page = ROOT / "docs" / name
        assert page.exists()
        assert not heading or f" {heading}\n" in page.read_text(), f"{heading} in {name}"


@of_pages(CURRENT)
def test_settings_that_a_page_names_exist(page):
    settings = set(setting_names(pg.Config))
    words = {setting.rpartition(".")[2] for setting in settings}
    text = page.read_text()
    named = set(re.findall(r"\bConfig\.(\w+(?:\.\w+)*)", text)) - {"changed"}
    assert named <= settings
    for call in re.findall(r"`(?:pg\.)?Config\(([^`]*)\)`", text):
        assert set(re.findall(r"(?:^|[,(] ?)(\w+)=", call)) <= words, call
