"""Packaging, public names, light imports, generated docs, and the error catalog."""

import ast
import importlib.util
import pickle
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import piecegraph
from piecegraph.errors import PiecegraphError
from tests.processes import output_of

ROOT = Path(piecegraph.__file__).parent


def test_every_folder_with_code_is_packaged(package_sources):
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {
        ".".join(["piecegraph", *path.parent.relative_to(ROOT).parts])
        for path in package_sources.values()
        if path.name == "__init__.py"
    }
    assert set(listed) == folders


def test_every_public_name_exists_and_others_do_not():
    for name in piecegraph.__all__:
        assert getattr(piecegraph, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = piecegraph.no_such_name


def test_type_checkers_see_the_same_public_names():
    imported = {
        alias.asname
        for node in ast.walk(ast.parse((ROOT / "public.py").read_text()))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname
    }
    assert imported == {*piecegraph.__all__} - {"__version__", "errors"}


def test_public_names_are_listed_before_they_are_used():
    listed = "import piecegraph; print(*set(piecegraph.__all__) - set(dir(piecegraph)))"
    assert output_of(sys.executable, "-c", listed).split() == []


def test_the_version_is_that_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert piecegraph.__version__ == project["version"]


def test_help_of_the_package_leaves_out_inherited_methods():
    text = pydoc.plain(pydoc.render_doc(piecegraph))
    assert len(text) < 90_000
    for internal in ("__pydantic", "casefold", "to_bytes"):
        assert internal not in text


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["config.md", "api.md", "../README.md", "starts.svg"])
def test_generated_docs_are_up_to_date(page):
    """Run `python docs/generate.py` after a change of docstrings, settings or public names."""
    assert (ROOT / "docs" / page).read_text() == generator().PAGES[page]()


def test_generated_docs_have_every_public_name():
    """And every setting: tests/tools/test_config_page.py."""
    names = [name for names in generator().NAMES.values() for name in names]
    assert sorted(names) == sorted(piecegraph.__all__)


LOOK_UP = """
from pathlib import Path
from types import ModuleType
from typing import Any
from piecegraph.cache import Cache, Key
from piecegraph.events import Events
Cache(Path("cache"), Events()).lookup("artifact", Key.of("codegen", {}))
"""
COMMAND = "from piecegraph.tools.cli.app import main; main({})".format
LIGHT = {
    "import piecegraph": ("torch", "numpy", "pydantic"),
    "from piecegraph.events import Events; Events().emit('x', n=1)": ("torch",),
    "import piecegraph.dispatch": ("torch", "numpy", "pydantic"),
    LOOK_UP: ("torch", "pydantic", "fsspec", "filelock"),
    COMMAND(["--help"]): ("torch", "numpy", "pydantic", "sympy"),
    COMMAND(["cache", "list", "--cache-dir", "."]): ("torch", "numpy", "sympy"),
    COMMAND(["cache", "stats", "--cache-dir", "."]): ("torch", "numpy", "sympy"),
}
"""Programs, and the heavy modules that they must not import."""


@pytest.mark.parametrize(("program", "heavy"), LIGHT.items())
def test_what_is_light_imports_nothing_heavy(program, heavy, tmp_path):
    probe = f"{program}\nimport sys; print(*({{*{heavy!r}}} & {{*sys.modules}}), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], cwd=tmp_path, capture_output=True)
    assert (done.returncode, done.stderr.split()) == (0, [])


def test_the_library_imports_what_it_depends_on(package_sources):
    """At the top of a file; what an extra brings is imported where it is used."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    installed = {re.match(r"[\w-]+", each)[0] for each in project["dependencies"]}
    for name, path in package_sources.items():
        if not name.startswith(("docs/", "tools/", "testing")):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                else:
                    absolute = isinstance(node, ast.ImportFrom) and not node.level
                    modules = [node.module or ""] if absolute else []
                for module in modules:
                    package = module.partition(".")[0]
                    assert package in installed | sys.stdlib_module_names, f"{name}: {module}"


def catalog(cls=PiecegraphError):
    for sub in cls.__subclasses__():
        if sub.what:
            yield sub
        yield from catalog(sub)


def test_every_error_says_what_and_what_to_do():
    for cls in catalog():
        assert cls.what, cls
        assert cls.todo.endswith("."), cls
        assert not cls.what.endswith("."), cls
        error = cls(where="model.py:3", **dict.fromkeys(cls.fields(), 7))
        assert "(at model.py:3)" in str(error)
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), again.facts) == (cls, str(error), error.facts)


def test_every_error_is_raised_somewhere(package_sources):
    sources = "\n".join(
        path.read_text() for name, path in package_sources.items() if name != "errors.py"
    )
    assert [cls.__name__ for cls in catalog() if cls.__name__ not in sources] == []


@pytest.mark.slow
def test_every_public_function_of_dispatch_has_a_caller(package_sources):
    """Policy that nothing but tests uses cannot be reached by an engine."""
    uses = {}
    defined = []
    for file, path in package_sources.items():
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            if name is not None:
                uses.setdefault(name, set()).add((path, node.lineno))
            elif isinstance(node, ast.FunctionDef) and file.startswith("dispatch/"):
                defined += [(path, node)] * (not node.name.startswith("_"))
    lonely = [
        function.name
        for path, function in defined
        if all(
            file == path and function.lineno <= line <= (function.end_lineno or 0)
            for file, line in uses.get(function.name, ())
        )
    ]
    assert len(defined) > 45
    assert lonely == []


def test_nothing_forks(package_sources):
    """A fork of a server keeps its sockets open, and hangs on what another thread has locked."""
    forks = ("os.fork", '"fork"', "forkserver", "os.posix_spawn")
    sources = [path for name, path in package_sources.items() if "fork" in path.read_text()]
    assert [path for path in sources if any(each in path.read_text() for each in forks)] == []


def test_each_mutant_quotes_a_source_text():
    """`make mutants` and `make cuda-mutants` take long, and end at the first one that does not."""
    from tests import mutants
    from tests.cuda_stand_in import mutants as on_stand_in

    quotes = [(each.file, each.old) for each in (*mutants.mutants(), *on_stand_in.mutants())]
    assert [(f, old) for f, old in quotes if old not in (ROOT / f).read_text()] == []


FACTORIES = {
    "arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand",
    "randint", "randn", "tensor", "zeros",
}  # fmt: skip


def test_new_tensors_of_ours_state_their_device(package_sources):
    """An engine may set a default device, as while it loads a model."""
    unstated = [
        f"{name}:{call.lineno}"
        for name, path in package_sources.items()
        if name.startswith(("runtime/", "compile/", "torch_compat/"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.")
        if ast.unparse(call.func).removeprefix("torch.") in FACTORIES
        if not {"device", None} & {keyword.arg for keyword in call.keywords}
    ]
    assert unstated == []
