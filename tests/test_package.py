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


def test_every_folder_with_code_is_packaged(package_sources: dict[str, Path]) -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(["piecegraph", *path.parent.relative_to(ROOT).parts])
        for path in package_sources.values()
        if path.name == "__init__.py"
    }
    assert set(listed) == folders


@pytest.mark.parametrize("name", piecegraph.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(piecegraph, name) is not None


def test_public_names_are_listed_before_they_are_used() -> None:
    listed = "import piecegraph; print(*set(piecegraph.__all__) - set(dir(piecegraph)))"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, check=True)
    assert done.stdout.split() == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = piecegraph.no_such_name


LOOK_UP = """
from pathlib import Path
from piecegraph.cache import Cache, Key
from piecegraph.events import Events
Cache(Path("cache"), Events()).lookup("artifact", Key.of("codegen", {}))
"""
ROOM = "import piecegraph.dispatch as room; [getattr(room, name) for name in room.__all__]"
HELP = "from piecegraph.tools.cli.app import main; main(['--help'])"
LIGHT = {
    "import piecegraph": ("torch", "numpy", "pydantic"),
    "from piecegraph.events import Events; Events().emit('x', n=1)": ("torch",),
    ROOM: ("torch", "numpy", "pydantic"),
    LOOK_UP: ("torch", "pydantic", "fsspec", "filelock"),
    HELP: ("torch", "numpy", "pydantic", "sympy"),
}
"""What runs without which modules: in a service's start or where there is no torch."""


@pytest.mark.parametrize(("program", "heavy"), LIGHT.items())
def test_what_is_light_imports_nothing_heavy(
    program: str, heavy: tuple[str, ...], tmp_path: Path
) -> None:
    probe = f"{program}\nimport sys; print(*({{*{heavy!r}}} & {{*sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr.split()) == (0, [])


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


def test_every_error_is_raised_somewhere(package_sources: dict[str, Path]) -> None:
    sources = "\n".join(
        path.read_text() for name, path in package_sources.items() if name != "errors.py"
    )
    assert [cls.__name__ for cls in catalogue() if cls.__name__ not in sources] == []
