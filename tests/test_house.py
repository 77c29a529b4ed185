"""The house itself: packaging, public names, imports that must stay light, the error catalogue."""

from __future__ import annotations

import pickle
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import piecegraph
from piecegraph.errors import PiecegraphError

ROOT = Path(piecegraph.__file__).parent


def test_every_folder_with_code_is_packaged() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(["piecegraph", *path.parent.relative_to(ROOT).parts])
        for path in ROOT.rglob("__init__.py")
        if not {"tests", ".venv", ".typing", "build"} & set(path.relative_to(ROOT).parts)
    }
    assert set(listed) == folders


@pytest.mark.parametrize("name", piecegraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(piecegraph, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = piecegraph.no_such_name


@pytest.mark.parametrize(
    "light", ["piecegraph", "piecegraph.dispatch", "piecegraph.cache", "piecegraph.tools.cli"]
)
def test_import_brings_no_torch(light: str) -> None:
    program = f"import sys, {light}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def catalogue(cls: type[PiecegraphError] = PiecegraphError) -> Iterator[type[PiecegraphError]]:
    for sub in cls.__subclasses__():
        if sub.what:
            yield sub
        yield from catalogue(sub)


@pytest.mark.parametrize("cls", [*catalogue()], ids=lambda cls: cls.__name__)
def test_every_error_says_what_and_what_to_do(cls: type[PiecegraphError]) -> None:
    assert cls.what
    assert cls.todo
    assert not cls.what.endswith(".")
    assert cls.todo.endswith(".")
    error = cls(where="model.py:3", **dict.fromkeys(cls.fields(), 7))
    assert "(at model.py:3)" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.facts) == (cls, str(error), error.facts)


def test_every_error_is_raised_somewhere() -> None:
    sources = "\n".join(
        path.read_text()
        for path in ROOT.rglob("*.py")
        if not {"tests", ".venv", ".typing"} & set(path.relative_to(ROOT).parts)
        and path.name != "errors.py"
    )
    assert [cls.__name__ for cls in catalogue() if cls.__name__ not in sources] == []
