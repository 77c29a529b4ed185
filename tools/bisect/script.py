"""A script that repeats a finding: it fails as long as the number is wrong."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch

from ..serve.options import write
from .finding import Finding
from .ladder import WARM
from .subject import Subject

_SCRIPT = '''"""Fails while this is wrong: {line}"""

import sys
from pathlib import Path

sys.path[:0] = {places!r}

from piecegraph.tools.bisect import reproduce

sys.exit(reproduce(Path(__file__).with_suffix(".pt"), {stage!r}))
'''


def write_script(
    subject: Subject, finding: Finding, path: Path, say: Callable[[str], None]
) -> None:
    """Write the script to `path` and, beside it, model, settings and steps as `.pt`.

    For a wrong number from the cache the cache goes with it, as `.cache`. What cannot be pickled,
    such as a model class made inside a function, is said through `say`.
    """
    root = subject.config.cache_dir
    if finding.stage == WARM and root is not None:
        kept = path.with_suffix(".cache")
        shutil.copytree(root, kept, dirs_exist_ok=True)
        subject = replace(subject, config=subject.config.changed(cache_dir=kept.absolute()))
    facts = {field.name: getattr(subject, field.name) for field in fields(subject)}
    facts["config"] = {
        name: getattr(subject.config, name) for name in subject.config.model_fields_set
    }
    try:
        torch.save(facts, path.with_suffix(".pt"))
    except Exception as error:
        say(f"no script: {type(error).__name__}: {error}")
        return
    places = [place for place in sys.path if place]
    write(path, _SCRIPT.format(line=finding.line(), places=places, stage=finding.stage))
    say(f"run `python {path}` to see it again")


def reproduce(data: Path, stage: str) -> int:
    """Check one stage of a subject saved by `write_script`: 1 if it is wrong, 0 if it is right.

    The file is unpickled: run only scripts that you have made yourself.
    """
    from ... import Config
    from .climb import check_stage

    facts = torch.load(data, weights_only=False)
    finding = check_stage(Subject(**{**facts, "config": Config(**facts["config"])}), stage)
    print(finding.line() if finding else f"stage {stage} is right")
    return 1 if finding else 0
