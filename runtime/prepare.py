"""`prepare`: from a model and its settings to a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..compile.ir.compilation import ExampleArguments
from ..compile.ir.locations import first_line
from ..config import Config, dispatch_plan, resolve_graph_mode
from ..errors import PiecegraphError, PrepareFailed
from ..events import Events
from ..torch_compat.basics.tensors import without_modes
from .assemble import Ranks, assemble, begin, exchange_of, mixed_rows_finder
from .backends.protocol import GraphBackend
from .backends.registry import choose_backend
from .core.allowed_work import allow_compilation
from .core.environment import Environment
from .core.exchange import single_rank
from .core.records import Records
from .core.report import mode_reasons
from .core.surroundings import must_be_plain
from .core_model import CoreModel
from .forward_context import ForwardContext
from .prepared_model import PreparedModel
from .setup.loading import compile_before_weights
from .setup.model_policy import ModelPolicy, find_bucket_holes
from .setup.remarks import remarks
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
    executor: Executor | None = None,
    weights: Callable[[], object] | None = None,
    device: torch.device | str | None = None,
) -> PreparedModel:
    """Compile `model`, or load it from the cache, and make it ready to capture and to serve.

    `examples` are (args, kwargs) to trace with; without them they are built from `config.inputs`.
    `layers` is what splitting ops find by name in the forward context. `backend` is a graph
    backend or its name: `"cuda"`, `"replay"` or an entry point of the group
    `piecegraph.backends`; None is the one for the device. `ranks` must all start and capture the
    same way. `events` is given the events of this model.
    `input_buffers` are inputs that the engine keeps in one place, at their largest size: steps are
    given their first rows, nothing is copied, and a graph replays on them.
    `executor` compiles pieces beside this process, on this machine or on others: any executor of
    `concurrent.futures`, such as those of Dask, Ray or MPI. A process whose settings or versions
    differ refuses, and what it cannot compile is compiled here. None is a pool of own workers.
    `weights` is called when the code of a model without weights is in the cache, and returns when
    they are loaded. `device` is where they will be, if those of `model` are on the meta device; a
    model on this device must not be loaded into before the call.
    Graphs are captured by `PreparedModel.capture`.

    Raises a PiecegraphError that names the problem with the model or the settings.
    """
    must_be_plain("prepare")
    records = Records(events)
    config = resolve_config(config)
    with (
        without_modes(),  # Dynamo fails under one, such as that of a delayed step in flight
        _naming_failures(model),
        records.events.span("prepare", level=logging.INFO),
        allow_compilation(),
        records.events.trace_unit(None, type(model).__qualname__, _location(model)),
    ):
        records.began()
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
        exchange = exchange_of(ranks)
        request_of = partial(compile_request, model, config, records, examples, exchange, executor)
        if weights is not None:
            compile_before_weights(request_of, model, device, weights)
        request = request_of()
        owned = tuple(input_buffers or {})
        policy_of = ModelPolicy(
            config, resolved, request.device, records, owned, mixed_rows_finder(request.cache)
        )
        beginning = begin(request, config, records, policy_of, ranks)
        with records.events.span("padding", level=logging.INFO):
            policy = policy_of(beginning.compiled)
        find_bucket_holes(config, records)
        for remark in remarks(config, resolved, policy.dispatcher.plan):
            records.add(remark)
        environment = Environment(
            config,
            _backend(backend, request.device),
            request.device,
            request.cache,
            records,
            exchange or single_rank,
        )
        with records.events.span("assemble", level=logging.INFO):
            core = CoreModel(
                environment,
                beginning.compiled,
                policy,
                ForwardContext(layers or {}),
                input_buffers or {},
                request,
            )
            return assemble(core, beginning)


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


def _location(model: torch.nn.Module) -> str | None:
    """file:line of the model's forward."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
