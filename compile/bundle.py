"""A bundle: the plan, the sources it was traced from, and every artifact it names.

It is complete: with nothing but a bundle and the model's weights, a process can serve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from ..cache import Cache, Entry, Key
from ..cache.factors import Json
from .artifact import Blobs
from .factors import source_digest
from .plan import Plan

PLAN = "plan.json"


class BadBundle(Exception):
    """The bundle is not for this model; the message says why. It never leaves the room."""


@dataclass(frozen=True)
class Bundle:
    """`modules` are those whose code was traced; `artifacts` are those the plan's spans name."""

    plan: Plan
    modules: Sequence[str]
    artifacts: Sequence[Blobs]


def store_bundle(cache: Cache, key: Key, bundle: Bundle) -> None:
    """Publish a bundle under its trace key, in the place of an earlier one."""
    blobs = {
        f"a{index}.{name}": content
        for index, artifact in enumerate(bundle.artifacts)
        for name, content in artifact.items()
    }
    meta: dict[str, Json] = {"sources": {name: source_digest(name) for name in bundle.modules}}
    cache.publish("bundle", key, meta, {PLAN: bundle.plan.model_dump_json().encode(), **blobs})


def read_bundle(entry: Entry) -> Bundle:
    """The bundle in a verified entry; raises BadBundle if the sources it names have changed."""
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
    artifacts: list[dict[str, bytes]] = [{} for _ in plan.sizes_of_artifacts()]
    for name, content in entry.contents.items():
        artifact, _, rest = name.partition(".")
        if artifact[0] == "a" and artifact[1:].isdigit() and int(artifact[1:]) < len(artifacts):
            artifacts[int(artifact[1:])][rest] = content
    return Bundle(plan, list(sources), artifacts)
