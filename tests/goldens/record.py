"""Print goldens, record them with `--write`, or print each dispatch decision with `--rows`.

`python -m tests.goldens.record [--write] [FILE…]`, in the root of the repository. Without FILE all.
With `--some` only some scenes of ranks are played.
"""

from __future__ import annotations

from piecegraph.tests.quick_imports import end, imported

# isort: split
import hashlib
import json
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.text_compiler import use_text_compiler

from ..compile.conditions.outcomes import outcomes
from . import decisions, exchanges, models, runs

HERE = Path(__file__).parent
SHOWN = 5
"""Decisions of each dispatch plan that are recorded as text."""
WIDTH = 320
"""Of a line of `runs.json`."""


def of_dispatch() -> dict[str, str]:
    """For each dispatch plan a hash of all its decisions, and the first ones to read."""
    goldens = {}
    for name, plan, captured in decisions.plans():
        lines = decisions.decisions(name, plan, captured)
        goldens[name] = {
            "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
            "entries": len(plan.entries),
            "first": lines[len(plan.entries) :][:SHOWN],
        }
    return {"decisions.json": _json(goldens)}


def of_models() -> dict[str, str]:
    """The plan of each model, and the digests of its pieces."""
    plans = {name: models.plan_of(name) for name in models.GOLDEN}
    return {
        "plans.json": _json({name: models.normalized(plan) for name, plan in plans.items()}),
        "digests.json": _json({name: models.digests(plan) for name, plan in plans.items()}),
    }


def of_conditions() -> dict[str, str]:
    """A line for each case of the condition suite. A minute or two."""
    return {"conditions.txt": "\n".join(outcomes()) + "\n"}


def of_runs() -> dict[str, str]:
    """Report and metrics of runs, and what ranks exchange. Ranks are forked, so they come first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIECEGRAPH_OFF", "")
        use_text_compiler(patch)
        scenes = exchanges.SOME if "--some" in sys.argv else exchanges.SCENES
        topics, of_ranks = exchanges.of_two_ranks(scenes)
        results = {**runs.reports(), "two ranks": of_ranks}
    return {"runs.json": "\n".join(_narrow(results)) + "\n", "exchanges.txt": topics}


GOLDENS: dict[str, Callable[[], dict[str, str]]] = {
    "decisions.json": of_dispatch,
    "plans.json": of_models,
    "digests.json": of_models,
    "runs.json": of_runs,
    "exchanges.txt": of_runs,
    "conditions.txt": of_conditions,
}
"""What makes each file; some make two."""


def goldens(names: list[str]) -> dict[str, str]:
    """The text of each file of these names."""
    makers = dict.fromkeys(GOLDENS[name] for name in names)
    made = {name: text for maker in makers for name, text in maker().items()}
    return {name: made[name] for name in names}


def _json(golden: dict[str, Any]) -> str:
    return json.dumps(golden, indent=1) + "\n"


def _narrow(value: Any, before: str = "", after: str = "", indent: int = 0) -> list[str]:
    """JSON of which each dict and list is on one line if it fits."""
    whole = f"{' ' * indent}{before}{json.dumps(value)}{after}"
    if len(whole) <= WIDTH or not isinstance(value, dict | list) or not value:
        return [whole]
    items = [*value.items()] if isinstance(value, dict) else [(None, item) for item in value]
    lines = [f"{' ' * indent}{before}{'{' if isinstance(value, dict) else '['}"]
    for number, (key, item) in enumerate(items):
        name = "" if key is None else f"{json.dumps(key)}: "
        lines += _narrow(item, name, "," if number + 1 < len(items) else "", indent + 1)
    return [*lines, f"{' ' * indent}{'}' if isinstance(value, dict) else ']'}{after}"]


def main() -> None:
    import_module("torch._dynamo")
    imported(freeze=True)
    names = [name for name in sys.argv[1:] if not name.startswith("--")] or [*GOLDENS]
    if "--rows" in sys.argv:
        for name, plan, captured in decisions.plans():
            print(f"# {name}", *decisions.decisions(name, plan, captured), sep="\n")
    elif "--write" in sys.argv:
        for name, text in goldens(names).items():
            (HERE / name).write_text(text)
    else:
        print(json.dumps(goldens(names)))


if __name__ == "__main__":
    main()
    end()
