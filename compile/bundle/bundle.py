"""A bundle: what it was traced from, the plan, and every artifact the plan names.

It is complete: a process can serve from a bundle and the model's weights alone. Several bundles may
be stored under one trace key; each holds the conditions under which it may be used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from pydantic import ValidationError

from ...cache import Cache, Entry, Key, Miss
from ...cache.keys.factors import Json, canonical
from ...cache.keys.key import VARIANT
from ...cache.manifest import Manifest
from ...events import Events
from ..conditions.conditions import Conditions, broken_conditions
from ..ir.compilation import Blobs, CompileRequest, is_own_code
from ..ir.plan import Plan

PLAN = "plan.json"
CANDIDATES = 8
"""Bundles under one trace key that differ in their conditions; a further one replaces one."""
SHOWN = 3
"""How many conditions that do not hold a reason names."""


class BadBundle(Exception):
    """The bundle is not for this model; the message says why. Internal to `compile`."""


@dataclass(frozen=True)
class Bundle:
    """`artifacts` are those the plan's ranges name."""

    plan: Plan
    artifacts: Sequence[Blobs]


def store_bundle(
    request: CompileRequest,
    key: Key,
    conditions: Conditions,
    plan: Plan,
    artifacts: Sequence[Blobs],
    compile_seconds: float,
) -> str | None:
    """Publish a bundle under its trace key beside others, or record why it cannot be.

    Returns its `Entry.digest`, None if it is not stored. `compile_seconds` is the time that a
    start from it saves.
    """
    obstacles = list(conditions.obstacles)
    if not all(artifacts):
        obstacles.append("the compiler's own caches are off, so it gives no artifacts")
    if obstacles:
        request.record_not_cacheable(obstacles)
        return None
    meta: dict[str, Json] = {
        "conditions": dict(conditions.data),
        "compile_seconds": round(compile_seconds, 3),
    }
    blobs = {
        f"a{index}.{name}": content
        for index, artifact in enumerate(artifacts)
        for name, content in artifact.items()
    }
    key = _free_key(request.cache, request.model, key, meta)
    blobs[PLAN] = _stored_plan(plan)
    entry = request.publish("bundle", key, meta, blobs)
    return None if entry.unstored else entry.digest


def find_bundle(
    cache: Cache,
    key: Key,
    model: torch.nn.Module,
    events: Events,
    *,
    refused: dict[str, str] | None = None,
    count: bool = True,
) -> Entry | Miss:
    """The first candidate under `key` whose conditions hold, or why there is none.

    Adds to `refused` why each other candidate was refused, by digest. Only a counted look-up is an
    event and in the counters.
    """
    refused = {} if refused is None else refused

    def refusal(manifest: Manifest) -> str | None:
        with events.span("bundle.conditions"):
            broken = broken_conditions(manifest.meta.get("conditions"), model)
        if not broken:
            return None
        more = f" and {len(broken) - SHOWN} more" if len(broken) > SHOWN else ""
        reason = "; ".join(map(str, broken[:SHOWN])) + more
        refused[manifest.digest] = reason
        return reason

    others = candidate_keys(key)
    result = cache.lookup("bundle", next(others), others=others, refusal=refusal, count=count)
    if isinstance(result, Miss) and refused:
        return replace(result, detail=" | ".join(dict.fromkeys(refused.values())))
    return result


def broken_condition(conditions: object, model: torch.nn.Module) -> str:
    """The first condition of a bundle in use that no longer holds; or nothing."""
    return next(map(str, broken_conditions(conditions, model)), "")


def stored_digests(cache: Cache, key: Key) -> set[str]:
    """Digests of the candidates under `key`, whether or not their conditions hold."""
    digests: set[str] = set()

    def refusal(manifest: Manifest) -> str:
        digests.add(manifest.digest)
        return "it is only listed"

    others = candidate_keys(key)
    cache.lookup("bundle", next(others), others=others, refusal=refusal, count=False)
    return digests


def candidate_keys(key: Key) -> Iterator[Key]:
    """The keys under which bundles with one trace key and different conditions are stored."""
    yield key
    for number in range(1, CANDIDATES):
        yield key.extended({VARIANT: number})


def _free_key(cache: Cache, model: torch.nn.Module, key: Key, meta: Mapping[str, Json]) -> Key:
    """The candidate key under which a bundle with these conditions is stored.

    It replaces the bundle with the same conditions, or the one that this process would use: a
    later trace of an equal model may have other guards, and a bundle beside the first would never
    be used. Else it takes a free key, or replaces any.
    """

    conditions = canonical(meta["conditions"])

    def refusal(manifest: Manifest) -> str | None:
        same = canonical(manifest.meta.get("conditions")) == conditions
        broken = broken_conditions(manifest.meta.get("conditions"), model)
        return None if same or not broken else "others hold"

    candidates, free = [*candidate_keys(key)], []
    for candidate in candidates:
        stored = cache.lookup("bundle", candidate, refusal=refusal, count=False)
        if isinstance(stored, Entry):
            return candidate
        if stored.reason != "refused":
            free.append(candidate)
    replaced = int(hashlib.sha256(conditions).hexdigest(), 16) % CANDIDATES
    return free[0] if free else candidates[replaced]


def _stored_plan(plan: Plan) -> bytes:
    """A plan as a bundle has it. A loaded plan gives the same bytes, by which it is found."""
    return plan.model_dump_json().encode()


def plan_digest(plan: Plan) -> str:
    """The digest that a plan has in a bundle."""
    return hashlib.sha256(_stored_plan(plan)).hexdigest()


def put_aside(cache: Cache, plan: Plan, model: torch.nn.Module, reason: str) -> bool:
    """Put the bundles of a model with their code out of service; whether there was one.

    Those whose conditions do not hold any more are not: no start of such a model takes them.
    """
    digest = plan_digest(plan)
    bundles = [
        each
        for each in cache.stored("bundle")
        if each.blobs[PLAN].sha256 == digest
        and not broken_conditions(each.meta.get("conditions"), model)
    ]
    blobs = (item for bundle in bundles for item in bundle.blobs.items() if item[0] != PLAN)
    code = [ref.sha256 for name, ref in blobs if is_own_code(name.partition(".")[2])]
    cache.put_aside(bundles, code, reason)
    return bool(bundles)


def read_bundle(entry: Entry) -> Bundle:
    """The bundle in a verified entry; raises BadBundle if its plan cannot be read."""
    try:
        plan = Plan.model_validate_json(entry.contents[PLAN])
    except (KeyError, ValidationError) as error:
        raise BadBundle(f"its plan cannot be read: {error}") from error
    artifacts: list[dict[str, bytes]] = [{} for _ in plan.sizes_of_artifacts()]
    for name, content in entry.contents.items():
        artifact, _, rest = name.partition(".")
        if artifact[0] == "a" and artifact[1:].isdigit() and int(artifact[1:]) < len(artifacts):
            artifacts[int(artifact[1:])][rest] = content
    return Bundle(plan, artifacts)
