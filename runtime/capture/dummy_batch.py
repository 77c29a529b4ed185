"""Dummy batches: what ops find in the forward context during a capture or a warm-up run."""

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

_RUNTIME = f"{Path(__file__).parents[1]}{os.sep}"


class _Layers(Mapping[str, Any]):
    """Layers that note which name was asked for and is missing."""

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

    Raises MetadataFailed if `metadata_for` raises, LayerMissing for a layer that does not exist.
    """
    context.decision = None
    context.metadata = _metadata(metadata_for, descriptor, mode) if metadata_for else None
    context.num_tokens = descriptor.num_tokens
    layers = context.layers
    context.layers = noting = _Layers(layers)
    try:
        with forward_context(context):
            yield
    except KeyError as error:
        if noting.missing is None or error.args != (noting.missing,):
            raise
        known = ", ".join(map(str, layers)) or "none"
        raise LayerMissing(where=_user_line(error), layer=noting.missing, known=known) from error
    finally:
        context.layers = layers


def _metadata(metadata_for: MetadataFor, descriptor: BatchDescriptor, mode: RuntimeMode) -> Any:
    try:
        return metadata_for(descriptor, mode)
    except torch.OutOfMemoryError:
        raise  # not the caller's mistake: a smaller batch may fit
    except Exception as error:
        raise MetadataFailed(
            where=_user_line(error),
            mode=mode.name,
            num_tokens=descriptor.num_tokens,
            reason=f"{type(error).__name__}: {first_line(error)}",
        ) from error


def _user_line(error: BaseException) -> str | None:
    """file:line of the innermost frame that belongs neither to torch nor to this package."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not is_torch_file(frame.filename) and not frame.filename.startswith(_RUNTIME)
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore torch's random generators at the end; a device's only if it is in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = range(torch.cuda.device_count()) if in_use else ()
    with torch.random.fork_rng(devices=devices):
        yield
