"""`prepare`: from a model and its settings to a prepared model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from ..compile.eager_model import eager_model, uncompiled_model
from ..compile.ir.compilation import BundleMiss, CompileRequest, ExampleArguments
from ..compile.ir.config import TOKENS
from ..compile.pipeline import compile_model, find_model
from ..compile.plan.compiled_model import CompiledModel
from ..dispatch import (
    Dispatcher,
    DispatchPlan,
    GraphMode,
    PaddingLimit,
    Phase,
    ResolvedMode,
    close_holes,
    find_holes,
)
from ..errors import AutocastActive, InvalidSetting
from ..events import Events
from ..torch_compat.basics.tensors import is_autocast_enabled
from .after_seal import allow_compilation
from .backends.protocol import GraphBackend
from .backends.registry import choose_backend
from .background import Background, Factory
from .config import ColdStart, Config, Padding, without_tokens
from .graphs.dummy_batch import model_state, preserve_contents, preserve_rng_state
from .model_steps import Behind, Engine, Services
from .policy import Policy, dispatch_plan, resolve_graph_mode
from .prepared_model import PreparedModel
from .ranks import Ranks
from .records import BucketHole, BucketsMissing, Records, RowsMixed
from .report import mode_reasons
from .request import compile_request
from .steps.row_mixing import find_mixed_rows
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
    factory: Factory | None = None,
) -> PreparedModel:
    """Compile `model`, or load it from the cache, and make it ready to capture and to serve.

    `examples` are (args, kwargs) to trace with; without them they are built from `config.inputs`.
    `layers` is what splitting ops find by name in the forward context. `backend` replaces the one
    that `config.graph_backend` names. `ranks` must all start and capture the same way.
    `events` is given the events of this model.
    `input_buffers` are inputs that the engine keeps in one place, at their largest size: steps are
    given their first rows, nothing is copied, and a graph replays on them.
    `factory` makes the same model in another process, for `Config(cold="serve")` on a device; its
    weights may be on the meta device.
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
            _policy, config, plan, resolved, request.device, records, tuple(input_buffers or {})
        )
        compiled, behind = _start(request, config, records, factory, policy_of)
        _find_bucket_holes(config, records)
    return PreparedModel(
        compiled,
        config,
        policy_of(compiled),
        Engine(layers or {}, input_buffers or {}, ranks),
        Services(
            backend or choose_backend(config.backend_for(request.device.type), request.device),
            request.device,
            request.cache,
            records,
        ),
        behind,
    )


def _start(
    request: CompileRequest,
    config: Config,
    records: Records,
    factory: Factory | None,
    policy_of: Callable[[CompiledModel], Policy],
) -> tuple[CompiledModel, Behind | None]:
    """The compiled model, or the uncompiled one and what compiles it."""
    if config.cold is ColdStart.COMPILE or not config.compile:
        return compile_model(request), None
    found = find_model(request)
    if isinstance(found, CompiledModel):
        return found, None
    if isinstance(found, BundleMiss):
        records.events.emit("background.impossible", level=logging.WARNING, reason=str(found))
        return compile_model(request), None
    uncompiled = uncompiled_model(request)
    background = Background(found, config, records, factory, request.exchange)
    return uncompiled, Behind(background, policy_of, partial(eager_model, request))


def _policy(
    config: Config,
    plan: DispatchPlan,
    resolved: ResolvedMode,
    device: torch.device,
    records: Records,
    owned: Collection[str],
    compiled: CompiledModel,
) -> Policy:
    """The dispatch policy for compiled code: without sizes it cannot run or must not pad to."""
    lows = [symbol.low for symbol in compiled.plan.symbols if symbol.label == TOKENS]
    if not lows:
        raise without_tokens(config)
    plan = plan.without_sizes_below(lows[0])
    pads = config.padding_limit != NO_PADDING
    if plan.entries and pads and _mixes_rows(compiled, config, device, records):
        unpadded = dispatch_plan(resolved.mode, config.changed(padding_limit=NO_PADDING))
        plan = unpadded.without_sizes_below(lows[0])
    for size in _padded_whole(compiled, config, owned) if plan.entries else ():
        if _mixes_rows(compiled, config, device, records, size):
            plan = dispatch_plan(GraphMode.NONE, config)  # no graph has the size of a step
            break
    return Policy(resolved, Dispatcher(plan))


def _find_bucket_holes(config: Config, records: Records) -> None:
    """Prove that every legal step has a bucket, or record those that have none."""
    if config.bucket_limits is None:
        return
    for phase in Phase:
        buckets = [bucket for bucket in config.buckets if bucket.phase is phase]
        holes = find_holes(phase, config.bucket_limits, buckets)
        closed = close_holes(phase, config.bucket_limits, buckets) if holes else ()
        for hole in holes:
            records.add(BucketHole(phase.value, tuple(hole.first), tuple(hole.last)))
        if closed:
            missing = sorted(set(closed) - set(buckets))
            records.add(BucketsMissing(phase.value, [tuple(bucket) for bucket in missing]))


NO_PADDING = PaddingLimit(tokens=0)


def _mixes_rows(
    compiled: CompiledModel,
    config: Config,
    device: torch.device,
    records: Records,
    size: str = TOKENS,
) -> bool:
    """Whether padding of `size` would change real rows."""
    padding = {item.label: config.padding_of(item.label) for item in compiled.plan.inputs}
    sentinels = {n: value for n, (kind, value) in padding.items() if kind is Padding.SENTINEL}
    with preserve_rng_state(), torch.no_grad(), preserve_contents(model_state(compiled)):
        found = find_mixed_rows(compiled, device, size=size, sentinels=sentinels)
    for mixed in found:
        records.add(RowsMixed(mixed.piece, mixed.result, mixed.where, mixed.size))
    return bool(found)


def _padded_whole(compiled: CompiledModel, config: Config, owned: Collection[str]) -> list[str]:
    """The sizes beside the tokens that every graph has at their largest, and that the library pads:
    no axis states them, and the engine does not write their inputs itself."""
    plan = compiled.plan
    sizes = {symbol.label: symbol.name for symbol in plan.symbols if symbol.label != TOKENS}
    for axis in config.axes:
        if not axis.rounds_up:
            sizes.pop(axis.name, None)
    written = [item for item in plan.inputs if item.label not in owned]
    return [n for n, symbol in sizes.items() if any(symbol in item.shape for item in written)]


def _location(model: torch.nn.Module) -> str | None:
    """file:line of the model's forward."""
    code = getattr(getattr(type(model), "forward", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None
