"""Load a model from its bundle, without a trace or a compiler, or say why there is none."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..cache import Cache, Entry, Key
from ..cache.inspection import nearest_entries
from ..errors import ModelMismatch
from .backends.inductor import load_library
from .bundle.bundle import (
    PLAN,
    BadBundle,
    Bundle,
    find_bundle,
    plan_digest,
    read_bundle,
    stored_digests,
)
from .bundle.key_factors import documented
from .ir.compilation import (
    LIBRARY,
    BundleMiss,
    BundleOutcome,
    Compiler,
    CompileRecords,
    CompileRequest,
    PieceFn,
    kernels,
)
from .plan.compiled_model import CompiledModel, weights_of
from .plan.report_plan import report_plan

SHOWN = 3
"""How many differences from the nearest entry a reason names."""


@dataclass(frozen=True)
class Loaded:
    """A model that can serve, and the plan digest on which ranks with the same key must agree."""

    compiled: CompiledModel
    plan_digest: str


def load_bundle(request: CompileRequest, key: Key, compiler: Compiler) -> Loaded | BundleMiss:
    """The model from the bundle under `key`, or the reason why there is none to use."""
    with request.events.span("cache.lookup", level=logging.INFO):
        refused: dict[str, str] = {}
        entry = find_bundle(request.cache, key, request.model, request.events, refused=refused)
    request.record_lookup("bundle", key, entry)
    if not isinstance(entry, Entry):
        detail = entry.located or _nearest(request.cache, key)
        miss = BundleMiss(entry.reason, detail, entry.remedy, frozenset(refused))
        request.record_miss(miss)
        return miss
    try:
        with request.events.span("bundle.load", level=logging.INFO):
            with request.events.span("bundle.read"):
                bundle = read_bundle(entry)
            pieces = _load(request, compiler, entry, bundle)
            conditions: Any = entry.meta["conditions"]
            with request.events.span("bundle.link"):
                compiled = CompiledModel(
                    bundle.plan,
                    tuple(pieces),
                    weights_of(request.model, bundle.plan),
                    request.model,
                    from_bundle=True,
                    conditions=conditions,
                    bundle=entry.digest,
                )
    except (BadBundle, ModelMismatch) as error:
        return _refused(request, str(error), entry)
    except Exception as error:  # code of another system or compiler
        return _refused(request, f"it cannot be loaded: {type(error).__name__}: {error}", entry)
    digest = entry.digest
    counts = kernels(bundle.artifacts)
    request.record_bundle(BundleOutcome(True, bytes=entry.size, kernels=counts, digest=digest))
    report_plan(bundle.plan, request.events)
    return Loaded(compiled, entry.manifest.blobs[PLAN].sha256)


def ranks_agree(
    request: CompileRequest, key: Key, local: Loaded | BundleMiss
) -> Loaded | BundleMiss:
    """`local` if all ranks can start from their bundles, else why not; then all of them trace.

    If some ranks loaded and others compiled they would run different code, and hang where only one
    of the two has a collective. Ranks may have different keys. Those with the same key must have
    the same plan; their code may differ in bytes. Raises RankLost where a rank does not answer.
    """
    if request.exchange is None:
        return local
    facts: Mapping[str, Any] = {
        "key": key.digest,
        "plan": local.plan_digest if isinstance(local, Loaded) else None,
        "reason": str(local) if isinstance(local, BundleMiss) else None,
    }
    plans: dict[str, str] = {}
    for rank, other in enumerate(request.exchange("bundle", facts)):
        if other["plan"] is None:
            return _refused(request, f"rank {rank} has none: {other['reason']}")
        if plans.setdefault(other["key"], other["plan"]) != other["plan"]:
            return _refused(request, f"rank {rank} has another plan under the same key")
    return local


@dataclass(frozen=True)
class NoBundle:
    """A model that has no bundle yet, and what is needed to compile it later.

    `miss` says why; it is None where this rank could use one: another rank has none, or it is
    stale.
    """

    request: CompileRequest
    key: Key
    compiler: Compiler
    miss: BundleMiss | None

    def may_be_stored(self) -> bool:
        """Whether a bundle may be stored now that this start has not tried."""
        if self.miss is None:
            return False
        tried = self.miss.tried
        return not tried or bool(stored_digests(self.request.cache, self.key) - tried)

    def finds(self, compiled: CompiledModel) -> bool:
        """Whether the next start finds the stored bundle of `compiled`, or that cannot be seen."""
        request = self.request
        stored = find_bundle(request.cache, self.key, request.model, request.events, count=False)
        if isinstance(stored, Entry):
            return stored.manifest.blobs[PLAN].sha256 == plan_digest(compiled.plan)
        return stored.reason != "absent"

    def agree(self, compiled: CompiledModel | BundleMiss) -> Loaded | BundleMiss:
        """The model of this rank if all ranks have the same plan, else why not.

        The records of the start, which had no bundle, stay as they are.
        """
        apart = replace(self.request, records=CompileRecords())
        if isinstance(compiled, BundleMiss):
            return ranks_agree(apart, self.key, compiled)
        return ranks_agree(apart, self.key, Loaded(compiled, plan_digest(compiled.plan)))


def _load(
    request: CompileRequest, compiler: Compiler, entry: Entry, bundle: Bundle
) -> list[PieceFn]:
    """Ahead-of-time libraries if every artifact has one, else what the compiler stored."""
    events = request.events
    if not all(LIBRARY in blobs for blobs in bundle.artifacts):
        assert compiler.load is not None
        if compiler.before_load is not None:
            compiler.before_load(events)
        with events.span("bundle.code"):
            if not events.wants_detail:
                return compiler.load(bundle.artifacts)
            pieces, places = list[PieceFn](), bundle.plan.places_of_artifacts()
            for index, blobs in enumerate(bundle.artifacts):  # below its piece, as when compiled
                piece, low, high = places[index]
                with events.trace_unit(piece, f"piece {piece}, tokens {low} to {high}"):
                    pieces += compiler.load([blobs])
            return pieces
    sizes = bundle.plan.sizes_of_artifacts()
    with events.span("bundle.libraries"):
        return [
            load_library(
                request.cache.path(entry, f"a{index}.{LIBRARY}"), sizes[index], request.device
            )
            for index in range(len(bundle.artifacts))
        ]


def _refused(request: CompileRequest, reason: str, entry: Entry | None = None) -> BundleMiss:
    tried = frozenset({entry.digest} if entry is not None else ())
    miss = BundleMiss(reason, tried=tried)
    request.record_miss(miss, logging.WARNING)
    return miss


def _nearest(cache: Cache, key: Key) -> str:
    """How the nearest bundle differs; empty if there is none."""
    for near in nearest_entries(cache.layers, "bundle", key, at_most=1):
        shown = "; ".join(map(documented, near.differences[:SHOWN]))
        more = len(near.differences) - SHOWN
        return f"the nearest differs in {shown}" + (f" and {more} more" if more > 0 else "")
    return ""
