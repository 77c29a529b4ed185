"""The code that a start begins with, and what runs beside its steps."""

from __future__ import annotations

import logging

from ....cache.settings import VerifyBundle
from ....compile.eager_model import uncompiled_model
from ....compile.ir.compilation import BundleMiss, CompileRequest
from ....compile.pipeline import compile_missing, compile_model, find_model, without_bundle
from ....compile.plan.compiled_model import CompiledModel
from ....config import BundleUse, Config
from ...core.records import Records
from .background import Background
from .verification import Verification, stale


def first_code(
    request: CompileRequest, config: Config, records: Records
) -> tuple[CompiledModel, Background | Verification | None]:
    """The code to start with, and what runs beside its steps."""
    serves = config.compile and config.bundle in (BundleUse.SERVE, BundleUse.SERVE_AHEAD)
    found = find_model(request) if serves else compile_model(request)
    if isinstance(found, BundleMiss):
        records.events.emit("background.impossible", level=logging.WARNING, reason=str(found))
        found = compile_model(request)
    if isinstance(found, CompiledModel):
        if not (found.from_bundle and config.cache):
            return found, None
        verification = Verification(request, found.plan, records)
        if config.cache.verify_bundle is VerifyBundle.BACKGROUND:
            return found, verification
        if config.cache.verify_bundle is VerifyBundle.OFF:
            return found, None
        if (refusal := verification.refusal()) is None:
            return found, None
        if config.bundle is BundleUse.FORCE:
            raise stale(request, refusal)
        found = without_bundle(request)
    if serves:
        return uncompiled_model(request), Background(found, records, request.exchange)
    return compile_missing(found), None
