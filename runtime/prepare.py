"""`prepare`: from a model and its settings to a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..compile.ir.compilation import CompileRequest, ExampleArguments
from ..compile.ir.config import TOKENS
from ..compile.lower.compiled_model import CompiledModel
from ..compile.pipeline import compile_model
from ..dispatch import Dispatcher, Histogram, PaddingLimit
from ..errors import AutocastActive, InvalidSetting
from ..events import Events
from ..torch_compat.modules import original_module
from ..torch_compat.tensors import is_autocast_enabled
from .backends.protocol import GraphBackend
from .backends.registry import choose_backend
from .capture.dummy_batch import model_state, preserve_contents, preserve_rng_state
from .config import Config, without_tokens
from .open_cache import open_cache
from .policy import dispatch_plan, resolve_graph_mode
from .prepared_model import Engine, Policy, PreparedModel, Services
from .records import Records, RowsMixed
from .report import mode_reasons
from .step.row_mixing import find_mixed_rows
from .strategy.monitors import allow_compilation
from .strategy.ranks import Ranks
from .switches import resolve_config


def prepare(
    model: torch.nn.Module,
    config: Config,
    *,
    examples: ExampleArguments | None = None,
    layers: Mapping[str, Any] | None = None,
    backend: GraphBackend | None = None,
    events: Events | None = None,
    ranks: Ranks | None = None,
    input_buffers: Mapping[str, torch.Tensor] | None = None,
) -> PreparedModel:
    """Compile `model`, or load it from the cache, and make it ready to capture and to serve.

    `examples` are (args, kwargs) to trace with; without them they are built from `config.inputs`.
    `layers` is what splitting ops find by name in the forward context. `backend` replaces the one
    that `config.graph_backend` names. `ranks` must all start and capture the same way.
    `events` is given the events of this model.
    `input_buffers` are inputs that the engine keeps in one place, at their largest size: steps are
    given their first rows, nothing is copied, and a graph replays on them.
    Graphs are captured by `PreparedModel.capture`.

    Raises a PiecegraphError that names the problem with the model or the settings.
    """
    if is_autocast_enabled():
        raise AutocastActive(action="prepare")
    if not isinstance(config, Config):
        raise InvalidSetting(
            name="config",
            value=type(config).__name__,
            reason="it is not a Config",
            expected="Config(**settings)",
        )
    records = Records(events)
    config = resolve_config(config)
    with records.events.span("prepare", level=logging.INFO), allow_compilation():
        resolved = resolve_graph_mode(config)
        plan = dispatch_plan(resolved.mode, config)
        records.settings = config.model_dump(mode="json")
        records.events.emit(
            "config",
            settings=records.settings,
            graph_mode=resolved.mode.value,
            reasons=mode_reasons(resolved),
            plan=[entry.as_json() for entry in plan.entries],
            plan_digest=plan.digest,
        )
        request = compile_request(model, config, records, examples, ranks)
        compiled = compile_model(request)
    lows = [symbol.low for symbol in compiled.plan.symbols if symbol.label == TOKENS]
    if not lows:
        raise without_tokens(config)
    if lows[0] > 1:
        plan = plan.without_sizes_below(lows[0])
    device = request.device
    if (
        plan.entries
        and config.padding_limit != NO_PADDING
        and _mixes_rows(compiled, device, records)
    ):
        unpadded = dispatch_plan(resolved.mode, config.changed(padding_limit=NO_PADDING))
        plan = unpadded.without_sizes_below(lows[0]) if lows[0] > 1 else unpadded
    return PreparedModel(
        compiled,
        config,
        Policy(resolved, Dispatcher(plan, histogram=Histogram())),
        Engine(layers or {}, input_buffers or {}, ranks),
        Services(
            backend or choose_backend(config.backend_for(device.type), device),
            device,
            request.cache,
            records,
        ),
    )


NO_PADDING = PaddingLimit(tokens=0)


def _mixes_rows(compiled: CompiledModel, device: torch.device, records: Records) -> bool:
    """Whether padding would change real rows; then graphs serve batches of their exact size."""
    with preserve_rng_state(), torch.no_grad(), preserve_contents(model_state(compiled)):
        found = find_mixed_rows(compiled, device)
    for mixed in found:
        records.add(RowsMixed(mixed.piece, mixed.result, mixed.where))
    return bool(found)


def compile_request(
    model: torch.nn.Module,
    config: Config,
    records: Records,
    examples: ExampleArguments | None,
    ranks: Ranks | None = None,
) -> CompileRequest:
    """What to compile, and with what: `config` as `resolve_config`, the model's device, the cache.

    Raises InvalidSetting for what is no model.
    """
    if not isinstance(model, torch.nn.Module):
        raise InvalidSetting(
            name="model",
            value=model,
            reason="it is a class" if isinstance(model, type) else "it is no torch.nn.Module",
            expected="an instance of torch.nn.Module, and for a function one that calls it",
        )
    model = original_module(model)
    if _device(model).type == "meta":
        raise InvalidSetting(
            name="model",
            value=type(model).__name__,
            reason="its weights are on the meta device, where they have no values",
            expected="a model with weights: model.to_empty(device=...), then load_state_dict",
        )
    exchange = ranks.exchange if ranks is not None else None
    cache, events, device = open_cache(config, records.events), records.events, _device(model)
    return CompileRequest(model, config, cache, events, device, examples, exchange, records.compile)


def _device(model: torch.nn.Module) -> torch.device:
    tensors = [*model.parameters(), *model.buffers()]
    return tensors[0].device if tensors else torch.device("cpu")
