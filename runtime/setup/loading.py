"""Compile a model while its weights load."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from ...compile.ir.compilation import BundleMiss, CompileRequest
from ...compile.ir.locations import first_line
from ...compile.pipeline import compile_missing, find_model, gc_paused
from ...compile.warm import NoBundle
from ...errors import InvalidSetting
from ...torch_compat.basics.modules import allocated


def compile_before_weights(
    request_of: Callable[[], CompileRequest],
    model: torch.nn.Module,
    device: torch.device | str | None,
    weights: Callable[[], object],
) -> None:
    """Put the code of `model` into the cache, then wait until `weights` has loaded it. What no
    cache can keep is compiled afterwards, by the start."""
    with with_memory(model, device), gc_paused():
        request = request_of()
        found = find_model(request) if request.config.compile else None
        if isinstance(found, NoBundle) and (reason := request.cache.keeps_nothing):
            found = BundleMiss("nothing can be stored in the cache", reason)
        if isinstance(found, NoBundle):
            compile_missing(found)
        elif isinstance(found, BundleMiss):
            request.events.emit("weights.first", level=logging.WARNING, reason=str(found))
    with request.events.span("weights", level=logging.INFO):
        weights()


def with_memory(
    model: torch.nn.Module, device: torch.device | str | None
) -> AbstractContextManager[None]:
    """Memory for what of `model` is on the meta device, if a device is stated.

    Raises InvalidSetting for what is no device.
    """
    if device is None or not isinstance(model, torch.nn.Module):
        return nullcontext()
    try:
        return allocated(model, torch.device(device))
    except RuntimeError as error:
        raise InvalidSetting(
            name="device", value=device, reason=first_line(error), expected='such as "cuda:0"'
        ) from error
