"""`compile_ahead`: give a model's bundle the form that loads in milliseconds."""

from __future__ import annotations

import threading
from concurrent.futures import Executor

import torch

from ..compile.ir.compilation import ExampleArguments
from ..compile.pipeline import find_model, gc_paused
from ..compile.plan.compiled_model import CompiledModel
from ..config import Config, resolve_graph_mode
from ..events import Events
from ..torch_compat.basics.tensors import without_modes
from .assemble import look_beside_steps, mixed_rows_finder
from .core.allowed_work import allow_compilation
from .core.records import Records
from .setup.loading import with_memory
from .setup.model_policy import ModelPolicy
from .setup.request import compile_request
from .setup.switches import resolve_config


def compile_ahead(
    model: torch.nn.Module,
    config: Config,
    *,
    examples: ExampleArguments | None = None,
    events: Events | None = None,
    executor: Executor | None = None,
    device: torch.device | str | None = None,
) -> bool:
    """Build AOTInductor libraries for `model` and put them into its bundle in the cache.

    Call it where time does not matter: after serving has started, or while an image is built. The
    next `prepare` with the same model and settings then imports neither Dynamo nor Inductor.
    `device` is for a model whose weights are on the meta device: code is made for weights there, so
    that it is in the cache when they have been loaded. The model is as before afterwards, and must
    not be loaded into meanwhile. `prepare` of the loaded model finds the bundle.
    `executor` builds them beside this process, as that of `prepare`.
    It also keeps what padding reaches, for which pieces run. In the main thread no step may run
    meanwhile; in others pieces run only on a CPU, and only if a step cannot see it.
    If a piece cannot have a library, or the cache cannot store the bundle, it returns False, emits
    the reason as an event and leaves the bundle unchanged. Raises what `prepare` raises.
    """
    records = Records(events)
    with with_memory(model, device):
        stored = build_libraries(model, config, records, examples, executor)
    if stored and device is None:
        _look_at_padding(model, config, records, examples)
    return stored


def build_libraries(
    model: torch.nn.Module,
    config: Config,
    records: Records,
    examples: ExampleArguments | None = None,
    executor: Executor | None = None,
) -> bool:
    """`compile_ahead` for a caller who reads in `records` why something was not stored."""
    from ..compile.ahead import compile_ahead as build  # imports the tracer

    config = resolve_config(config)
    with without_modes(), allow_compilation(), gc_paused():
        return build(compile_request(model, config, records, examples, executor=executor))


def _look_at_padding(
    model: torch.nn.Module, config: Config, records: Records, examples: ExampleArguments | None
) -> None:
    """Keep what padding reaches, so that the next start need not look.

    Another thread than the main one may work beside steps.
    """
    config = resolve_config(config.changed(bundle="use"))
    with without_modes(), allow_compilation():
        request = compile_request(model, config, records, examples)
        found = find_model(request)
        if isinstance(found, CompiledModel):
            finder = mixed_rows_finder(request.cache)
            resolved = resolve_graph_mode(config)
            policy_of = ModelPolicy(config, resolved, request.device, records, (), finder)
            if threading.current_thread() is threading.main_thread():
                policy_of(found)
            else:
                look_beside_steps(policy_of, request.cache)(found)
