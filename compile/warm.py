"""Load a model from its bundle: no trace, no compiler; or say why that cannot be."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..cache import Entry, Key
from ..cache.explain import why
from ..errors import ModelMismatch
from .backends.library import load_library
from .backends.registry import Compiler
from .bundle.bundle import PLAN, BadBundle, Bundle, read_bundle
from .ir.artifact import LIBRARY, PieceFn, kernels
from .ir.request import Task
from .lower.compiled_model import CompiledModel, bind
from .lower.report_plan import tell_lookup, tell_plan

SHOWN = 3
"""Differences from the nearest entry that a reason names."""


@dataclass(frozen=True)
class Found:
    """A model from its bundle, and what ranks with the same key must have in common."""

    compiled: CompiledModel
    plan_digest: str


def warm_start(task: Task, key: Key, compiler: Compiler) -> Found | str:
    """The model from the bundle under `key`, or the reason why there is none to use."""
    with task.events.span("cache.lookup", level=logging.INFO):
        entry = task.cache.lookup("bundle", key)
    tell_lookup("bundle", key, entry, task.cache, task.events)
    if not isinstance(entry, Entry):
        detail = entry.detail or _nearest(task, key)
        task.events.emit("bundle", hit=False, reason=entry.reason, detail=detail)
        return f"{entry.reason}: {detail}" if detail else entry.reason
    try:
        with task.events.span("bundle.load", level=logging.INFO):
            bundle = read_bundle(entry, task.model, task.device)
            pieces = _load(task, compiler, entry, bundle)
            compiled = bind(bundle.plan, pieces, task.model, from_bundle=True)
    except (BadBundle, ModelMismatch) as error:
        return _refused(task, str(error))
    except Exception as error:  # a library of another system, code of another compiler: compile
        return _refused(task, f"it cannot be loaded: {type(error).__name__}: {error}")
    task.events.emit("bundle", hit=True, bytes=entry.size, kernels=kernels(bundle.artifacts))
    tell_plan(bundle.plan, task.events)
    return Found(compiled, entry.manifest.blobs[PLAN].sha256)


def agreed(task: Task, key: Key, found: Found | str) -> Found | str:
    """`found` if all ranks can start from their bundles, else why not: then all of them trace.

    A start that takes the bundle on some ranks and compiles on others would run different code,
    and hang where one of the two has a collective. Ranks may have different keys; those with the
    same one must have the same plan, while equal code need not be equal to the byte. Raises
    RankLost where a rank does not answer.
    """
    if task.exchange is None:
        return found
    own: Mapping[str, Any] = {
        "key": key.digest,
        "plan": found.plan_digest if isinstance(found, Found) else None,
        "reason": found if isinstance(found, str) else None,
    }
    plans: dict[str, str] = {}
    for rank, other in enumerate(task.exchange("bundle", own)):
        if other["plan"] is None:
            return _refused(task, f"rank {rank} has none: {other['reason']}")
        if plans.setdefault(other["key"], other["plan"]) != other["plan"]:
            return _refused(task, f"rank {rank} has another plan under the same key")
    return found


def _load(task: Task, compiler: Compiler, entry: Entry, bundle: Bundle) -> list[PieceFn]:
    """Ahead-of-time libraries if every artifact has one, else what the compiler stored."""
    if not all(LIBRARY in blobs for blobs in bundle.artifacts):
        assert compiler.load is not None
        return compiler.load(bundle.artifacts)
    sizes = bundle.plan.sizes_of_artifacts()
    return [
        load_library(task.cache.path(entry, f"a{index}.{LIBRARY}"), sizes[index], task.device)
        for index in range(len(bundle.artifacts))
    ]


def _refused(task: Task, reason: str) -> str:
    task.events.emit("bundle", level=logging.WARNING, hit=False, reason=reason)
    return reason


def _nearest(task: Task, key: Key) -> str:
    """How the nearest bundle in the private directory differs; empty if there is none."""
    if task.cache.private is None:
        return ""
    for near in why(task.cache.private.root, "bundle", key, at_most=1):
        shown = "; ".join(map(str, near.differences[:SHOWN]))
        more = len(near.differences) - SHOWN
        return f"the nearest differs in {shown}" + (f" and {more} more" if more > 0 else "")
    return ""
