"""What came of the changes: reads what two runs of `starts` have written."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

from .changes import CHANGES, Change


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


def outcomes(folder: Path) -> dict[str, list[str]]:
    found = defaultdict(list)
    for change in CHANGES:
        files = [folder / change.name / f"start-{number}.json" for number in (1, 2)]
        if all(file.exists() for file in files):
            found[outcome(change, *(json.loads(file.read_text()) for file in files))].append(
                change.name
            )
    return dict(found)


if __name__ == "__main__":
    for kind, names in sorted(outcomes(Path(sys.argv[1])).items()):
        print(f"{len(names):4} {kind}: {', '.join(names)}")
