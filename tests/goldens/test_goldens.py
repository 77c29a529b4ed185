"""Recorded texts are those of this code, byte for byte; see `record.py`.

A digest that changes makes every user compile again: a change that must do so records them again.
"""

from __future__ import annotations

import difflib
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.compile.conditions.outcomes import CASES, one_of_each, outcomes
from tests.processes import PYTHON, output_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FILES = ("decisions.json", "plans.json", "digests.json", "runs.json", "exchanges.txt")
"""What `make test` records again and compares; of `conditions.txt` some lines."""
TRACED_BY = "2.13."
"""Torch version of all goldens but the decisions: they hold its graphs and names of its ops."""
NOT_TRACED = {
    "attribute_float_subclass": "builtin operator `float`",
    "handled_in_tensors": "object has no attribute 'pg_gain'",
    "hash_of_a_string": "builtin operator `hash`",
    "set_of_a_set_of_strings": "AssertionError",
    "set_popped": "AssertionError",
    "setting_that_dynamo_guards": "op returned non-Tensor",
}
"""Cases that Dynamo 2.11 cannot trace, and a word of the error, which has the line."""
WRONG_IN_TORCH = {"class_attribute_that_is_held"}
"""Cases that torch.compile alone gets wrong in 2.11: `is` of two places."""
SHOWN = 100
"""Lines of a difference that are printed."""

pytestmark = [pytest.mark.compile, pytest.mark.slow]


def recorded_now(*names: str) -> dict[str, str]:
    """What `record` would write into these files, made in a process of its own."""
    environment = {**os.environ, "PIECEGRAPH_OFF": ""}
    out = output_of(PYTHON, "-m", "tests.goldens.record", *names, cwd=ROOT, env=environment)
    texts: dict[str, str] = json.loads(out)
    return texts


def expect_equal(name: str, golden: str, text: str) -> None:
    if golden == text:
        return
    lines = difflib.unified_diff(
        golden.splitlines(), text.splitlines(), f"tests/goldens/{name}", "now", n=2, lineterm=""
    )
    shown = "\n".join([*lines][:SHOWN])
    command = f"python -m tests.goldens.record --write {name}"
    pytest.fail(f"{name} has changed. If it must:\n{command}\n{shown}", pytrace=False)


def needs_torch(name: str) -> None:
    if not version("torch").startswith(TRACED_BY):
        pytest.skip(f"{name} is of torch {TRACED_BY}x: NOT tested with {version('torch')}")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return recorded_now(*FILES, "--some")


@pytest.mark.parametrize("name", FILES)
def test_nothing_differs_from_what_was_recorded(texts, name):
    if name != "decisions.json":
        needs_torch(name)
    golden = (HERE / name).read_text()
    if name == "exchanges.txt":  # paragraphs of some scenes
        found = {scene.partition("\n")[0] for scene in texts[name].split("\n\n")}
        scenes = [each for each in golden.split("\n\n") if each.partition("\n")[0] in found]
        golden = "\n\n".join(scenes)
    expect_equal(name, golden, texts[name])


@pytest.mark.heavy
def test_what_ranks_exchange_in_all_scenes_is_as_recorded():
    name = "exchanges.txt"
    needs_torch(name)
    expect_equal(name, (HERE / name).read_text(), recorded_now(name)[name])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("which", ["sample", pytest.param("all", marks=pytest.mark.heavy)])
def test_cases_of_conditions_come_out_as_recorded(which):
    """No result is stale: a changed value is a miss, an equal one a hit. The sample has one case
    of each kind of reason."""
    golden = (HERE / "conditions.txt").read_text().splitlines()
    recorded = {line.partition(":")[0]: line for line in golden}
    found = outcomes(CASES.keys() if which == "all" else one_of_each(golden))
    lines = {line.partition(":")[0]: line for line in found}
    assert which == "sample" or lines.keys() == recorded.keys()
    if version("torch").startswith(TRACED_BY):
        expect_equal("conditions.txt", "\n".join(map(recorded.get, lines)), "\n".join(found))
        return
    for name, line in lines.items():  # reasons hold names of graphs
        old, new = (text.partition(": ")[2] for text in (recorded[name], line))
        if version("torch") < "2.12" and name in NOT_TRACED:
            assert new.startswith("error: TraceFailed"), line
            assert "case.py:" in new
            assert NOT_TRACED[name] in new
        elif version("torch") >= "2.12" or name not in WRONG_IN_TORCH:
            assert old.partition(":")[0] == new.partition(":")[0], line
