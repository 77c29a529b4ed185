"""`compile_ahead`: give a model's bundle the form that loads in milliseconds."""

from __future__ import annotations

import torch

from ..compile.ir.compilation import ExampleArguments
from ..compile.pipeline import gc_paused
from ..config import Config
from ..events import Events
from .core.allowed_work import allow_compilation
from .core.records import Records
from .setup.request import compile_request
from .setup.switches import resolve_config


def compile_ahead(
    model: torch.nn.Module,
    config: Config,
    *,
    examples: ExampleArguments | None = None,
    events: Events | None = None,
) -> bool:
    """Build AOTInductor libraries for `model` and put them into its bundle in the cache.

    Call it where time does not matter: after serving has started, or while an image is built. The
    next `prepare` with the same model and settings then imports neither Dynamo nor Inductor.
    If a piece cannot have a library it returns False, emits the reason as an event and leaves the
    bundle unchanged. Raises what `prepare` raises.
    """
    return build_libraries(model, config, Records(events), examples)


def build_libraries(
    model: torch.nn.Module,
    config: Config,
    records: Records,
    examples: ExampleArguments | None = None,
) -> bool:
    """`compile_ahead` for a caller who reads in `records` why something was not stored."""
    from ..compile.ahead import compile_ahead as build  # imports the tracer

    config = resolve_config(config)
    with allow_compilation(), gc_paused():
        return build(compile_request(model, config, records, examples))
