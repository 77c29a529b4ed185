"""A bundle: what it was traced from, the plan, and every artifact the plan names.

It is complete: a process can serve from a bundle and the model's weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from pydantic import ValidationError

from ...cache import Cache, Entry, Key
from ...cache.keys.factors import Json
from ..ir.compilation import Blobs
from ..ir.plan import Plan
from .provenance import changed_since

PLAN = "plan.json"


class BadBundle(Exception):
    """The bundle is not for this model; the message says why. Internal to `compile`."""


@dataclass(frozen=True)
class Bundle:
    """`provenance` is what it was traced from; `artifacts` are those the plan's spans name."""

    plan: Plan
    provenance: Mapping[str, Json]
    artifacts: Sequence[Blobs]


def store_bundle(cache: Cache, key: Key, bundle: Bundle) -> None:
    """Publish a bundle under its trace key, replacing an earlier one."""
    blobs = {
        f"a{index}.{name}": content
        for index, artifact in enumerate(bundle.artifacts)
        for name, content in artifact.items()
    }
    cache.publish(
        "bundle", key, bundle.provenance, {PLAN: bundle.plan.model_dump_json().encode(), **blobs}
    )


def read_bundle(entry: Entry, model: torch.nn.Module) -> Bundle:
    """The bundle in a verified entry.

    Raises BadBundle if what it was traced from has changed, or if its plan cannot be read.
    """
    if reason := changed_since(entry.meta, model):
        raise BadBundle(reason)
    try:
        plan = Plan.model_validate_json(entry.contents[PLAN])
    except (KeyError, ValidationError) as error:
        raise BadBundle(f"its plan cannot be read: {error}") from error
    artifacts: list[dict[str, bytes]] = [{} for _ in plan.sizes_of_artifacts()]
    for name, content in entry.contents.items():
        artifact, _, rest = name.partition(".")
        if artifact[0] == "a" and artifact[1:].isdigit() and int(artifact[1:]) < len(artifacts):
            artifacts[int(artifact[1:])][rest] = content
    return Bundle(plan, entry.meta, artifacts)
