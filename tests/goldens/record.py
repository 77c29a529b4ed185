"""Print what the goldens hold, record it with `--write`, or print each decision with `--rows`.

`python -m tests.goldens.record`, in the root of the repository.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from . import decisions, models

HERE = Path(__file__).parent
SHOWN = 5
"""Decisions of each dispatch plan that are recorded as text."""


def of_dispatch() -> dict[str, Any]:
    """For each dispatch plan a hash of all its decisions, and the first ones to read."""
    goldens = {}
    for name, plan, captured in decisions.plans():
        lines = decisions.decisions(name, plan, captured)
        goldens[name] = {
            "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            "entries": len(plan.entries),
            "first": lines[len(plan.entries) :][:SHOWN],
        }
    return goldens


def goldens() -> dict[str, dict[str, Any]]:
    """All goldens by the name of their file."""
    plans = {name: models.plan_of(name) for name in models.GOLDEN}
    return {
        "decisions": of_dispatch(),
        "plans": {name: models.normalized(plan) for name, plan in plans.items()},
        "digests": {name: models.digests(plan) for name, plan in plans.items()},
    }


def main() -> None:
    if "--rows" in sys.argv:
        for name, plan, captured in decisions.plans():
            print(f"# {name}", *decisions.decisions(name, plan, captured), sep="\n")
    elif "--write" in sys.argv:
        for name, data in goldens().items():
            (HERE / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    else:
        print(json.dumps(goldens()))


if __name__ == "__main__":
    main()
