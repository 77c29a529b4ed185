"""What becomes of each case of the condition suite, as a line of text."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.processes import PYTHON, output_of

from .cases import adversary_sources, sources, unread_sources

REPOSITORY = Path(__file__).parents[3]
LONGEST = 400
"""Characters of a reason; of a longer one a hash of the whole follows."""

NOT_ALONE = {"global_pre_hook", "global_forward_hook", "shape_of_a_numpy_array"}
"""Cases before them in the process change what becomes of them: torch counts hooks, for one."""
CASES = {**sources(), **unread_sources(), **adversary_sources()}
Outcome = dict[str, Any]


def write(names: Collection[str], folder: Path) -> None:
    """Both variants of the cases, and the first once more at another place."""
    for variant, place in enumerate(("first", "second")):
        for name in names:
            chosen = re.sub(
                r"<<(.*?)\|(.*?)>>", lambda m, v=variant: m[1 + v], CASES[name], flags=re.DOTALL
            )
            main, _, helper = chosen.partition("\n#helper\n")
            case = folder / place / name
            case.mkdir(parents=True)
            (case / f"case_{name}.py").write_text(main)
            if helper:
                (case / "helper.py").write_text(helper)
    shutil.copytree(folder / "first", folder / "moved")


def starts(folder: Path, *runs: tuple[str, str]) -> list[dict[str, Outcome]]:
    """Starts of all cases, for each use of a bundle and variant of them, on one cache."""
    program = [PYTHON, "-m", "tests.compile.conditions.run_cases"]
    environment = {
        **os.environ,
        "PIECEGRAPH_OFF": os.environ.get("PIECEGRAPH_OFF", "").replace("verification", ""),
        "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]),
        "PYTHONHASHSEED": str(len(runs[0][1])),
    }
    arguments = [word for bundle, variant in runs for word in (bundle, str(folder / variant))]
    out = output_of(*program, folder / "cache", *arguments, cwd=REPOSITORY, env=environment)
    return [json.loads(line) for line in out.splitlines()]


def outcomes(names: Collection[str] = CASES.keys()) -> list[str]:
    """Of each case by name: hit, or refused, another key or not cached with the reason."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write(names, folder)
        cold, unchanged = starts(folder, ("use", "first"), ("force", "moved"))
        (changed,) = starts(folder, ("force", "second"))  # with other hashes of strings
    return [
        f"{name}: {_outcome(name, cold[name], changed[name], unchanged[name])}"
        for name in sorted(names)
    ]


def _outcome(name: str, cold: Outcome, changed: Outcome, unchanged: Outcome) -> str:
    """Of one case: its first start, that of the changed model, and that of an equal one."""
    if errors := [start["error"] for start in (cold, changed, unchanged) if "error" in start]:
        text = f"error: {errors[0]}"
    elif not (cold["right"] and unchanged["right"] and changed["right"]):
        text = "STALE HIT" if changed["hit"] else "WRONG RESULT"
    elif cold["not_kept"]:
        text = f"not cached: {cold['not_kept']}"
    elif not unchanged["hit"]:
        text = f"WRONG, a miss of an equal model: {unchanged['reason']}"
    elif changed["hit"]:
        text = "hit"
    else:
        text = changed["reason"].strip().replace("absent:", "another key:", 1)
    return _normalized(text.replace(f"case_{name}", "case"))


def _normalized(text: str) -> str:
    """Without folders, and without hashes of code and lines of Python's own, which are of its
    version."""
    text = re.sub(r"/\S+/(?:first|second|moved)/\w+/", "", text)
    text = re.sub(r"<code [0-9a-f]+>", "<code>", text)
    text = re.sub(r"(<frozen \w+>):\d+", r"\1", text)
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}... sha256 {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def one_of_each(lines: Collection[str]) -> list[str]:
    """Names of few cases that show what all do, those that show the most first."""
    shown = {line.partition(":")[0]: _shown(line) for line in lines}
    possible = shown.keys() - NOT_ALONE
    missing, names = set().union(*(shown[name] for name in possible)), list[str]()
    while missing:
        names.append(max(sorted(possible), key=lambda name: len(shown[name] & missing)))
        missing -= shown[names[-1]]
    return names


def _shown(line: str) -> set[tuple[str, str]]:
    """Each kind of outcome with each step of a path and each kind of observation; all paths are in
    `make heavy`."""
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", line)
    _, outcome, *reason = plain.split(": ", 2)
    changes = (change.partition(": ") for change in "".join(reason).split("; "))
    return {
        (outcome, part)
        for place, _, values in changes
        for part in (
            *re.findall(r"^\w*|\[|__\w+__| [a-z_]+", place),
            *re.findall("the code of|one object", values),
        )
    }
