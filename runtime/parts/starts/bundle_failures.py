"""Bundles that are intact and fail when they run: put aside after they failed in two starts.

The first failure of a bundle is noted in the cache, for all machines that share a writable layer.
One start counts once: a device that is broken fails in each step.
What raises in an op between pieces, lacks memory or is one of our errors is no fault of a bundle.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ....cache import Cache, Entry, Key
from ....compile.bundle.bundle import put_aside
from ....compile.ir.locations import first_line
from ....compile.plan.codegen import failed_piece
from ....compile.plan.compiled_model import CompiledModel
from ....errors import PiecegraphError
from ...core.records import BundleFailed, Records

KIND = "failed"


def note_failure(
    error: BaseException, compiled: CompiledModel, cache: Cache, records: Records
) -> None:
    """Note an error of compiled code that came from a bundle; the second puts the bundle aside."""
    bundle = records.compile.bundle
    if not compiled.from_bundle or bundle is None or bundle.digest is None:
        return
    if records.of(BundleFailed):
        return
    for cause in _causes(error):
        piece = failed_piece(cause)
        if piece is None or isinstance(cause, PiecegraphError | torch.OutOfMemoryError):
            continue
        reason = f"piece {piece} failed when it ran: {type(cause).__name__}: {first_line(cause)}"
        key = Key.of("trace", {"bundle": bundle.digest})
        again = isinstance(cache.lookup(KIND, key, count=False), Entry)
        if again:
            put_aside(cache, compiled.plan, compiled.model, reason)
        else:
            cache.publish(KIND, key, {}, {})
        records.add(BundleFailed(bundle.digest, reason, again))
        outcome = "it is put aside" if again else "it is put aside if another start fails in it"
        error.add_note(f"In the code of bundle {bundle.digest[:12]}: {outcome}.")
        return


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
