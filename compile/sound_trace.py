"""A trace whose guards all hold, or are treated as the policy says.

Torch's own layout decisions put guards on sizes that the model does not depend on: `reshape` of a
transposed tensor asks whether a size is 1. A trace that is refused is therefore tried once more
with unbacked sizes, which allow no such question; what passes there is right for every size.
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import CompileError, GuardUnproved
from ..events import Events
from .asserts import take_size_asserts
from .config import CompileConfig, DynamicShapes
from .guards import GuardBook
from .planning import symbol_labels
from .trace import Trace, trace

Given = tuple[tuple[Any, ...], dict[str, Any]] | None


def sound_trace(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: Given,
    events: Events,
) -> tuple[Trace, GuardBook, CompileConfig]:
    """The trace, its guards, and `config` with the type of dynamic shapes it was made with.

    Raises GuardUnproved and Specialised under the policy `prove`, and the errors of `trace`.
    """
    try:
        return _settled(model, config, device, examples, events)
    except GuardUnproved as refusal:
        if config.dynamic_shapes is DynamicShapes.UNBACKED:
            raise
        unbacked = _with(config, DynamicShapes.UNBACKED)
        try:
            found = _settled(model, unbacked, device, examples, events)
        except CompileError:
            raise refusal from None
        events.emit("trace.unbacked", reason=str(refusal))
        return found


def _settled(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: Given,
    events: Events,
) -> tuple[Trace, GuardBook, CompileConfig]:
    traced = trace(model, config, device, examples, events)
    labels = symbol_labels(traced)
    book = GuardBook(traced.shape_env, labels, config, events)
    book.check_symbols()
    book.settle("dynamo", take_size_asserts(traced.graph.graph, labels, traced.shape_env))
    if config.dynamic_shapes is DynamicShapes.BACKED:
        # Dynamo takes a backed size to be at least 2 and leaves no guard for that: trace once
        # more without the assumption, only for the guards which that brings to light.
        oblivious = _with(config, DynamicShapes.BACKED_SIZE_OBLIVIOUS)
        book.unproved += _settled(model, oblivious, device, examples, events)[1].unproved
    return traced, book, config


def _with(config: CompileConfig, shapes: DynamicShapes) -> CompileConfig:
    return config.model_copy(update={"dynamic_shapes": shapes})
