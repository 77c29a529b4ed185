"""No stale result: for all that a model reads, a changed value is a miss, an equal one a hit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from .cases import sources, unread_sources

REPOSITORY = Path(__file__).parents[3]
NEVER_CACHED = {
    "environment_iterated": "is read as a whole",
    "environment_length": "is read as a whole",
    "hash_of_a_string": "the hash of an object",
    "identity_of_bytes": "is one object or two",
    "identity_of_floats": "is one object or two",
    "identity_of_integers": "is one object or two",
    "identity_of_strings": "is one object or two",
    "set_of_a_set_of_strings": "the order of a set",
    "set_of_strings": "the order of a set",
    "set_popped": "the order of a set",
    "substituted_in_the_graph": "the code of g cannot be located",
}
"""Cases that rely on what cannot be described by value, and a word of the reason."""
NOT_TRACED = {
    "attribute_float_subclass": "builtin operator `float`",
    "handled_in_tensors": "object has no attribute 'pg_gain'",
    "hash_of_a_string": "builtin operator `hash`",
    "set_of_a_set_of_strings": "AssertionError",
    "set_popped": "AssertionError",
    "setting_that_dynamo_guards": "op returned non-Tensor",
}
"""Cases that Dynamo 2.11 cannot trace, and a word of the error, which has the line."""
WRONG_IN_TORCH = {
    "class_attribute_that_is_held": "torch.compile alone is wrong in 2.11: `is` of two places",
}
"""Cases that torch 2.11 cannot run, and the reason."""


def write(folder: Path, variant: int) -> None:
    for name, source in {**sources(), **unread_sources()}.items():
        chosen = re.sub(r"<<(.*?)\|(.*?)>>", lambda m: m[1 + variant], source, flags=re.DOTALL)
        main, _, helper = chosen.partition("\n#helper\n")
        (folder / name).mkdir(parents=True)
        (folder / name / f"case_{name}.py").write_text(main)
        if helper:
            (folder / name / "helper.py").write_text(helper)


def starts(
    bundle: str, folder: Path, root: Path, names: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    program = [sys.executable, "-m", "tests.compile.conditions.run_cases"]
    command = [*program, bundle, str(folder), str(root), *names]
    environment = {
        **os.environ,
        "PIECEGRAPH_OFF": os.environ.get("PIECEGRAPH_OFF", "").replace("verification", ""),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "PYTHONHASHSEED": str(len(str(folder))),
    }
    run = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    results: dict[str, dict[str, Any]] = json.loads(run.stdout)
    return results


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, dict[str, Any]]]:
    """Three processes on one cache: the first variant, the second, the first at another place.

    They start the cases whose tests were selected.
    """
    tests = [item for item in request.session.items if item.path == request.path]
    names = sorted(item.callspec.params["name"] for item in tests if hasattr(item, "callspec"))
    base = tmp_path_factory.mktemp("conditions")
    write(base / "first", 0)
    write(base / "second", 1)
    shutil.copytree(base / "first", base / "first_moved_elsewhere")
    return {
        name: starts(bundle, base / folder, base / "cache", names)
        for name, bundle, folder in (
            ("cold", "use", "first"),
            ("changed", "force", "second"),
            ("control", "force", "first_moved_elsewhere"),
        )
    }


pytestmark = pytest.mark.slow


def test_there_are_cases_enough():
    assert len(sources()) >= 120


def each_eighth(cases: Iterable[str]) -> list[Any]:
    """All cases; `make test` takes every eighth, and those that are never cached."""
    kept = {*sorted(cases)[::8], *NEVER_CACHED}
    needs = {n: [pytest.mark.needs_torch("2.12", why)] for n, why in WRONG_IN_TORCH.items()}
    return [
        pytest.param(name, marks=[*needs.get(name, ()), *[pytest.mark.heavy] * (name not in kept)])
        for name in sorted(cases)
    ]


@pytest.mark.parametrize("name", each_eighth(sources()))
def test_a_changed_value_is_a_miss_and_an_equal_one_a_hit(name, outcomes):
    cold, changed, control = (outcomes[run][name] for run in ("cold", "changed", "control"))
    if name in NOT_TRACED and version("torch") < "2.12":
        assert cold["error"].startswith("TraceFailed")
        assert f"case_{name}.py:" in cold["error"]
        assert NOT_TRACED[name] in cold["error"]
        return
    assert all("error" not in each for each in (cold, changed, control)), (cold, changed, control)
    assert cold["right"]
    assert changed["right"], changed
    assert not changed["hit"]
    assert control["right"]
    if name in NEVER_CACHED:
        assert NEVER_CACHED[name] in cold["not_kept"]
        assert not control["hit"]
    else:
        assert cold["not_kept"] is None
        assert control["hit"], control["reason"]
        assert " -> " in changed["reason"] or "the code of" in changed["reason"]
        assert "<code" not in changed["reason"] or "torch_state" in changed["reason"]


@pytest.mark.parametrize("name", each_eighth(unread_sources()))
def test_what_nobody_read_is_in_no_key(name, outcomes):
    changed = outcomes["changed"][name]
    assert changed["hit"], changed
    assert changed["right"]
