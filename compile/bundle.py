"""A bundle: the plan, the sources it was traced from, and every artifact it names.

It is complete: with nothing but a bundle and the model's weights, a process can serve.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..cache import Entry
from .factors import source_digest
from .inductor import Blobs
from .plan import Plan

PLAN = "plan.json"


class BadBundle(Exception):
    """The bundle is not for this model; the message says why. It never leaves the room."""


def bundle_contents(
    plan: Plan, modules: list[str], artifacts: list[Blobs]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Meta data and blobs of the entry. `modules` are those whose code was traced."""
    meta = {
        "pieces": len(plan.pieces),
        "sources": {name: source_digest(name) for name in modules},
    }
    blobs = {
        f"p{index}.{name}": content
        for index, artifact in enumerate(artifacts)
        for name, content in artifact.items()
    }
    return meta, {PLAN: plan.model_dump_json().encode(), **blobs}


def read_bundle(entry: Entry) -> tuple[Plan, list[Blobs]]:
    """Plan and artifacts of a verified entry; raises BadBundle if its sources have changed."""
    sources = entry.meta.get("sources")
    if not isinstance(sources, dict):
        raise BadBundle("it does not say what it was traced from")
    for name, digest in sources.items():
        if source_digest(name) != digest:
            raise BadBundle(f"the source of {name} has changed")
    try:
        plan = Plan.model_validate_json(entry.contents[PLAN])
    except (KeyError, ValidationError) as error:
        raise BadBundle(f"its plan cannot be read: {error}") from error
    artifacts: list[Blobs] = [{} for _ in plan.pieces]
    for name, content in entry.contents.items():
        piece, _, rest = name.partition(".")
        if name != PLAN and piece.removeprefix("p").isdigit():
            artifacts[int(piece[1:])][rest] = content
    return plan, artifacts
