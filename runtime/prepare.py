"""`prepare`: from a model and its settings to a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..cache.settings import VerifyBundle
from ..compile.eager_model import uncompiled_model
from ..compile.ir.compilation import BundleMiss, CompileRequest, ExampleArguments
from ..compile.ir.locations import first_line
from ..compile.pipeline import compile_missing, compile_model, find_model, without_bundle
from ..compile.plan.compiled_model import CompiledModel
from ..config import BundleUse, Config
from ..errors import AutocastActive, InvalidSetting, PiecegraphError, PrepareFailed
from ..events import Events
from ..torch_compat.basics.tensors import is_autocast_enabled
from .backends.protocol import GraphBackend
from .backends.registry import choose_backend
from .core.records import Records
from .core.report import mode_reasons
from .parts.ranks.ranks import Ranks
from .parts.seal.monitor import allow_compilation
from .parts.starts.background import Background
from .parts.starts.code_in_service import Source
from .parts.starts.verification import Verification, stale
from .prepared_model import PreparedModel
from .setup.model_policy import find_bucket_holes, model_policy
from .setup.policy import dispatch_plan, resolve_graph_mode
from .setup.request import compile_request
from .setup.switches import resolve_config


def prepare(
    model: torch.nn.Module,
    config: Config,
    *,
    examples: ExampleArguments | None = None,
    layers: Mapping[str, Any] | None = None,
    backend: GraphBackend | str | None = None,
    events: Events | None = None,
    ranks: Ranks | None = None,
    input_buffers: Mapping[str, torch.Tensor] | None = None,
) -> PreparedModel:
    """Compile `model`, or load it from the cache, and make it ready to capture and to serve.

    `examples` are (args, kwargs) to trace with; without them they are built from `config.inputs`.
    `layers` is what splitting ops find by name in the forward context. `backend` is a graph
    backend or its name: `"cuda"`, `"replay"` or an entry point of the group
    `piecegraph.backends`; None is the one for the device. `ranks` must all start and capture the
    same way. `events` is given the events of this model.
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
    with (
        _naming_failures(model),
        records.events.span("prepare", level=logging.INFO),
        allow_compilation(),
        records.events.trace_unit(0, type(model).__qualname__, _location(model)),
    ):
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
        policy_of = partial(
            model_policy,
            config,
            plan,
            resolved,
            request.device,
            records,
            tuple(input_buffers or {}),
        )
        compiled, beside = _start(request, config, records)
        find_bucket_holes(config, records)
        return PreparedModel(
            compiled,
            config,
            policy_of(compiled),
            _backend(backend, request.device),
            request.device,
            request.cache,
            records,
            layers=layers,
            input_buffers=input_buffers,
            ranks=ranks,
            source=Source(request, policy_of, beside),
        )


@contextmanager
def _naming_failures(model: torch.nn.Module) -> Iterator[None]:
    """Convert what fails in torch, or in tensors and modules of its own kind, to PrepareFailed."""
    try:
        yield
    except PiecegraphError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        name = type(model).__qualname__
        raise PrepareFailed(where=_location(model), model=name, reason=reason) from error


def _backend(backend: GraphBackend | str | None, device: torch.device) -> GraphBackend:
    """The graph backend that was passed or named, or the one for the device."""
    if backend is None:
        backend = "replay" if device.type == "cpu" else device.type
    return choose_backend(backend, device) if isinstance(backend, str) else backend


def _start(
    request: CompileRequest, config: Config, records: Records
) -> tuple[CompiledModel, Background | Verification | None]:
    """The code to start with, and what runs beside its steps."""
    serves = config.compile and config.bundle in (BundleUse.SERVE, BundleUse.SERVE_AHEAD)
    found = find_model(request) if serves else compile_model(request)
    if isinstance(found, BundleMiss):
        records.events.emit("background.impossible", level=logging.WARNING, reason=str(found))
        found = compile_model(request)
    if isinstance(found, CompiledModel):
        if not (found.from_bundle and config.cache):
            return found, None
        verification = Verification(request, found.plan, records)
        if config.cache.verify_bundle is VerifyBundle.BACKGROUND:
            return found, verification
        if config.cache.verify_bundle is VerifyBundle.OFF:
            return found, None
        if (refusal := verification.refusal()) is None:
            return found, None
        if config.bundle is BundleUse.FORCE:
            raise stale(request, refusal)
        found = without_bundle(request)
    if serves:
        return uncompiled_model(request), Background(found, records, request.exchange)
    return compile_missing(found), None


def _location(model: torch.nn.Module) -> str | None:
    """file:line of the model's forward."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
