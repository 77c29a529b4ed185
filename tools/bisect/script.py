"""A script that reproduces a finding: it fails as long as the result is wrong."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from ..report.output import Output
from .case import BisectCase
from .finding import Finding
from .stages import WARM

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
    cache: Path,
) -> None:
    """Write the script to `path` and, beside it, model, settings and steps as `.pt`.

    For a wrong result from the cache, `cache` is copied beside it as `.cache`. A case that cannot
    be pickled, such as one of a class made inside a function, is reported through `say`.
    """
    if finding.stage == WARM:
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
