"""What the mask of a transformers model says, from the function that it is made with."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from .attention import Mask

ALL = Mask(causal=False)
_MODULE = "transformers.masking_utils"


class UnknownMask(Exception):
    """A mask that the op cannot express; the message says which."""


def mask_of(function: Callable[..., Any], mask: Mask = ALL) -> Mask:
    """`mask` and what `function` adds to it; raises UnknownMask.

    That requests do not see each other is left to the op, and so are positions inside requests.
    """
    name = getattr(function, "__qualname__", repr(function))
    if function.__module__ != _MODULE:
        raise UnknownMask(f"{function.__module__}.{name}")
    cells = inspect.getclosurevars(function).nonlocals
    match name.removesuffix(".<locals>.inner_mask"):
        case "causal_mask_function":
            return replace(mask, causal=True)
        case "bidirectional_mask_function" | "packed_sequence_mask_function":
            return mask
        case "sliding_window_overlay":
            return replace(mask, window=cells["sliding_window"])
        case "sliding_window_bidirectional_overlay":
            return replace(mask, window=cells["sliding_window"] + 1)
        case "chunked_overlay":
            return replace(mask, chunk=cells["chunk_size"])
        case "remap_positions_for_packed_sequence":
            return mask_of(cells["mask_function"], mask)
        case "and_masks.<locals>.and_mask":
            for each in cells["mask_functions"]:
                mask = mask_of(each, mask)
            return mask
    raise UnknownMask(name.partition(".")[0])
