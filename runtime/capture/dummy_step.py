"""A dummy step: what ops find in the forward context while a graph is captured or code warms up."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ...compile.ir.locations import first_line
from ...dispatch import BatchDescriptor, RuntimeMode
from ...errors import LayerMissing, MetadataFailed
from ...torch_compat.dynamo import is_torch_file
from ..step.forward_context import ForwardContext, forward_context

MetadataFor = Callable[[BatchDescriptor, RuntimeMode], Any]
"""Makes the metadata of a dummy batch that fills a descriptor; called before each capture."""

_HERE = f"{Path(__file__).parents[1]}{os.sep}"


class _Layers(Mapping[str, Any]):
    """Layers that remember which one was asked for in vain."""

    def __init__(self, layers: Mapping[str, Any]) -> None:
        self._layers = layers
        self.missing: str | None = None

    def __getitem__(self, name: str) -> Any:
        try:
            return self._layers[name]
        except KeyError:
            self.missing = name
            raise

    def __iter__(self) -> Iterator[str]:
        return iter(self._layers)

    def __len__(self) -> int:
        return len(self._layers)


@contextmanager
def dummy_step(
    context: ForwardContext,
    metadata_for: MetadataFor | None,
    descriptor: BatchDescriptor,
    mode: RuntimeMode,
) -> Iterator[None]:
    """Make `context` that of a dummy batch inside the block.

    Raises MetadataFailed if `metadata_for` does, LayerMissing for a layer that is not there.
    """
    context.decision = None
    context.metadata = _metadata(metadata_for, descriptor, mode) if metadata_for else None
    context.num_tokens = descriptor.num_tokens
    layers = context.layers
    context.layers = asked = _Layers(layers)
    try:
        with forward_context(context):
            yield
    except KeyError as error:
        if asked.missing is None or error.args != (asked.missing,):
            raise
        known = ", ".join(map(str, layers)) or "none"
        raise LayerMissing(where=_place(error), layer=asked.missing, known=known) from error
    finally:
        context.layers = layers


def _metadata(metadata_for: MetadataFor, descriptor: BatchDescriptor, mode: RuntimeMode) -> Any:
    try:
        return metadata_for(descriptor, mode)
    except torch.OutOfMemoryError:
        raise  # no mistake: a smaller batch may fit
    except Exception as error:
        raise MetadataFailed(
            where=_place(error),
            mode=mode.name,
            num_tokens=descriptor.num_tokens,
            reason=f"{type(error).__name__}: {first_line(error)}",
        ) from error


def _place(error: BaseException) -> str | None:
    """file:line of the innermost frame that is neither torch's nor of this room."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [
        f for f in frames if not is_torch_file(f.filename) and not f.filename.startswith(_HERE)
    ]
    return f"{users[-1].filename}:{users[-1].lineno}" if users else None
