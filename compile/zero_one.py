"""What tracing with plain backed sizes hides: that a size of 0 or 1 would take another way.

Dynamo takes a backed size to be at least 2 and leaves no guard for it. The model is therefore
traced once more without that assumption, only for the guards that this brings to light.
"""

from __future__ import annotations

from typing import Any

import torch

from ..events import Events
from .config import CompileConfig, DynamicShapes
from .guards import Guard, GuardBook
from .planning import symbol_labels
from .trace import trace


def hidden_guards(
    model: torch.nn.Module,
    config: CompileConfig,
    device: torch.device,
    examples: tuple[tuple[Any, ...], dict[str, Any]] | None,
    events: Events,
) -> list[Guard]:
    """The guards that hold only for sizes of 2 and more, unproved; see `GuardBook.settle`.

    Raises GuardUnproved and Specialised under the policy `prove`.
    """
    if config.dynamic_shapes is not DynamicShapes.BACKED:
        return []
    oblivious = config.model_copy(update={"dynamic_shapes": DynamicShapes.BACKED_SIZE_OBLIVIOUS})
    traced = trace(model, oblivious, device, examples, events)
    book = GuardBook(traced.shape_env, symbol_labels(traced), oblivious, events)
    book.check_symbols()
    book.settle("dynamo, sizes of 0 and 1")
    return book.unproved
