"""The input of a search, and a script with which a finding can be reproduced."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from ... import BatchDescriptor, Config, RuntimeMode
from ..report.output import Output
from ..steps import Step
from .finding import Finding


@dataclass(frozen=True, slots=True)
class BisectCase:
    """A model with `steps`, which are run in order, from the same state on every stage.

    `layers` is what splitting ops find in the forward context, `capture_metadata` what
    `PreparedModel.capture` takes. A step is wrong where an element differs from the eager model's
    by more than `tolerance`, absolute and relative; None chooses by dtype.
    """

    model: torch.nn.Module
    config: Config
    steps: Sequence[Step]
    layers: Mapping[str, Any] = field(default_factory=dict)
    capture_metadata: Callable[[BatchDescriptor, RuntimeMode], Any] | None = None
    tolerance: float | None = None


_SCRIPT = '''"""Fails while this is wrong: {line}"""

import sys
from pathlib import Path

sys.path[:0] = {places!r}

from piecegraph.tools.bisect import reproduce

sys.exit(reproduce(Path(__file__).with_suffix(".pt"), {stage!r}))
'''


def write_script(
    case: BisectCase,
    finding: Finding,
    path: Path,
    say: Callable[[str], None],
    cache: Path | None,
) -> None:
    """Write the script to `path` and, beside it, model, settings and steps as `.pt`.

    `cache`, for a wrong result from it, is copied beside it as `.cache`. A case that cannot be
    pickled, such as one of a class made inside a function, is reported through `say`.
    """
    if cache is not None:
        kept = path.with_suffix(".cache")
        shutil.copytree(cache, kept, dirs_exist_ok=True)
        case = replace(case, config=case.config.changed(cache_dir=kept.absolute()))
    facts = {field.name: getattr(case, field.name) for field in fields(case)}
    facts["config"] = {name: getattr(case.config, name) for name in case.config.model_fields_set}
    try:
        torch.save(facts, path.with_suffix(".pt"))
    except Exception as error:
        say(f"no script: {type(error).__name__}: {error}")
        return
    places = [place for place in sys.path if place]
    Output(path).write(_SCRIPT.format(line=finding.line(), places=places, stage=finding.stage))
    say(f"run `python {path}` to see it again")


def load_case(data: Path) -> BisectCase:
    """The case that `write_script` saved as `data`, which is unpickled."""
    facts = torch.load(data, weights_only=False)
    return BisectCase(**{**facts, "config": Config(**facts["config"])})
