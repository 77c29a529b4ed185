"""A second start, in another process, is right although somebody changed the program.

The changes were written without looking at what conditions record.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from piecegraph.compile.bundle import bundle as bundles
from piecegraph.torch_compat.tracing.dynamo import import_dynamo
from tests.text_compiler import use_text_compiler

from .changes import CHANGES, Change
from .starts import in_a_child

pytestmark = pytest.mark.compile

ROOT = Path(__file__).parents[3]
RIGHT = {
    "altering: refused by key or conditions",
    "altering: found by verification",
    "harmless: refused by key or conditions",
    "harmless: hit and verified",
    "not cacheable",
    "not served",
    "wrong without a cache",
}
"""Of what torch traces wrongly too, there is nothing that a bundle could be compared with."""

WITHOUT_CONDITIONS = {
    # the graph holds the number, which has no effect in evaluation
    "seed_of_dropout_in_evaluation": "falsely refused",
    # a thread does not see another one's locals: docs/starts.md says to verify before the steps
    "thread_local": "wrong and not verified",
}


def outcome(change: Change, first: dict, second: dict) -> str:
    kind = "altering" if change.alters else "harmless"
    if "error" in first:
        return "not served"
    if "error" in second:
        refused = second["error"].startswith("ModelChanged")
        return f"{kind}: refused by a step" if refused else "the second start fails"
    if not (first.get("without_a_cache", True) and second.get("without_a_cache", True)):
        return "wrong without a cache"
    if change.alters and not second["altered"]:
        return "nothing altered"
    if first["not_cacheable"]:
        return "not cacheable" if second["second"] else "silently wrong"
    if not second["hit"]:
        right = second["first"] and second["second"]
        return f"{kind}: refused by key or conditions" if right else "silently wrong"
    if second["verified"] is True:
        right = second["first"] and second["second"]
        return f"{kind}: hit and verified" if right else "silently wrong"
    if second["verified"] is False:
        if not second["second"]:
            return "silently wrong"
        return "altering: found by verification" if change.alters else "falsely refused"
    return "right and not verified" if second["second"] else "wrong and not verified"


def outcomes(folder: Path) -> dict[str, str]:
    """By name what came of the changes of which two starts have written."""
    found = {}
    for change in CHANGES:
        files = [folder / change.name / f"start-{number}.json" for number in (1, 2)]
        if all(file.exists() for file in files):
            found[change.name] = outcome(change, *(json.loads(f.read_text()) for f in files))
    return found


PARTS = 6
"""Each takes a minute, and ten on a busy machine."""


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("blind", [False, True], ids=["conditions", "verification"])
@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_nothing_is_silently_wrong_and_nothing_right_is_refused(blind, part, tmp_path):
    """Hashes of strings differ between the starts. Where verification is alone, steps compare no
    model either: what they come to in the time of two steps differs from run to run."""
    names = [change.name for change in CHANGES[part::PARTS]]
    program = [sys.executable, "-m", "tests.compile.two_starts.starts"]
    off = "checks" if blind else ""
    for number in ("1", "2"):
        environment = {**os.environ, "PIECEGRAPH_OFF": off, "PYTHONHASHSEED": number}
        arguments = [*(["--blind"] if blind else []), number, str(tmp_path), *names]
        subprocess.run([*program, *arguments], check=True, cwd=ROOT, env=environment)
    found = outcomes(tmp_path)
    assert len(found) == len(names)
    others = {name: kind for name, kind in found.items() if kind not in RIGHT}
    known = WITHOUT_CONDITIONS if blind else {}
    assert others == {name: known[name] for name in names if name in known}
    assert [*found.values()].count("harmless: hit and verified") >= 60 // PARTS


def test_the_runner_sees_a_stale_bundle(tmp_path, monkeypatch):
    """No condition refuses, and verification is off."""
    monkeypatch.setenv("PIECEGRAPH_OFF", "verification")
    monkeypatch.setattr(bundles, "broken_conditions", lambda *_: [])
    use_text_compiler(monkeypatch)
    import_dynamo()  # once, and not in each child
    (change,) = (each for each in CHANGES if each.name == "closure")
    for number in (1, 2):
        in_a_child(change, number, tmp_path / "closure")
    assert outcomes(tmp_path) == {"closure": "wrong and not verified"}
