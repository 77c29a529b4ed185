"""Continuous batching of transformers through piecegraph: `accelerate(model)`, then as before.

    accelerate(model, Config(max_num_tokens=512))
    model.generate_batch(inputs, generation_config)

Steps of `generate_batch` and of `ContinuousBatchingManager` run a prepared base model. The paged
cache, the attention function, the head and the sampling are those of transformers: attention with
its cache update is the splitting op, and what transformers passes to a step is the metadata. A call
without a paged cache, or with more tokens than `max_num_tokens`, runs the model as it is.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import transformers
from packaging.version import Version
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.modeling_outputs import MoeModelOutputWithPast

from ... import (
    Batch,
    BatchDescriptor,
    Config,
    Events,
    PreparedModel,
    RuntimeMode,
    Shadow,
    prepare,
)
from ...errors import ToolMissing
from ...runtime.tensors_by_path import tensors_by_path
from .transformers import PackedModel, Rule
from .transformers.mixers import run_own_forwards
from .transformers.routing import refusal
from .unused import warn_if_unused

log = logging.getLogger("piecegraph")

OLDEST = "5.24"
"""The first transformers whose models update the paged cache: before, attention functions did."""

NOT_FOR_ATTENTION = {"attention_mask", "cache", "input_ids", "inputs_embeds", "use_cache"}
"""Arguments of a model's forward that do not reach its attention function as they are."""


Before = tuple[str, bool]
"""The attention of a model's own calls, and whether they use a cache."""


def accelerate(
    model: PreTrainedModel, config: Config | None = None, *, events: Events | None = None
) -> PreparedModel:
    """Prepare the base model of `model` and run its steps with a paged cache through it.

    `config` sets limits, cache and graphs; inputs and splitting ops are known. Without it there are
    PIECEWISE graphs on a GPU and none on a CPU. Raises the errors of `prepare`, ModelNotAdaptable
    for a layer that mixes tokens and is no attention, and ToolMissing if transformers is too old.
    """
    if Version(transformers.__version__) < Version(OLDEST):
        found = f"transformers {OLDEST} or newer (found {transformers.__version__})"
        raise ToolMissing(name=found, extra="batching")
    base = model.base_model
    mode = "NONE" if model.device.type == "cpu" else "PIECEWISE"
    config = config or Config(graph_mode=mode)
    config = config.changed(shadow=config.shadow or Shadow())
    if config.cache and config.cache.verify_bundle == "background":
        config = config.changed(**{"cache.verify_bundle": "before"})
    before = list[Before]()
    attention, use_cache = model.config._attn_implementation, base.config.use_cache
    try:
        packed = PackedModel(base, config=config)
        _check_layers(packed)
        config = config.changed(**packed.settings)
        routed = model.config._attn_implementation, base.config.use_cache
        layers = {
            name: _attend_with(module, before)
            for name, module in base.named_modules()
            if hasattr(module, "layer_idx")
        }
        layers |= packed.layers
        prepared = prepare(packed, config, layers=layers, events=events)
        prepared.parts.starts.wait_until_compiled()  # a trace needs the model as it is now
    finally:
        model.set_attn_implementation(attention)
        base.config.use_cache = use_cache
        run_own_forwards(base)
    if prepared.dispatcher.plan.entries:
        prepared.capture(_no_requests)
    base.forward = _steps_through(prepared, base.forward)
    _route_eager_calls(packed, model, routed, before)
    prepared.parts.checks.accept_changes()
    warn_if_unused(model, prepared, _is_paged)
    prepared.seal()
    return prepared


class StepOutput(MoeModelOutputWithPast):  # type: ignore[misc]
    """What a base model returns, with None for all but its hidden states, by any name."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _check_layers(packed: PackedModel) -> None:
    """Refuse layers that need a request's earlier tokens, of which the paged cache has none."""
    for name, mixer in packed.layers.items():
        if not mixer.by_row:
            kind = type(mixer.module).__name__
            reason = f"{name} ({kind}) runs over whole requests, and has no paged cache"
            raise refusal(packed.model, reason, "Serve it without `accelerate`")


def _no_requests(descriptor: BatchDescriptor, mode: RuntimeMode) -> Mapping[str, Any]:
    """Metadata of a dummy batch."""
    return {}


def _is_paged(arguments: Mapping[str, Any]) -> bool:
    """Whether it is a call of continuous batching: others have a cache of another class."""
    return isinstance(arguments.get("cache"), PagedAttentionCache)


def _steps_through(prepared: PreparedModel, forward: Any) -> Any:
    """The forward of the base model: a prepared step where transformers gives a paged cache."""
    most, names = prepared.config.max_num_tokens, tuple(inspect.signature(forward).parameters)
    watched = None

    def step(*args: Any, **keywords: Any) -> Any:
        nonlocal watched
        arguments = {**dict(zip(names, args, strict=False)), **keywords}
        input_ids = arguments.get("input_ids")
        if input_ids is None or not _is_paged(arguments):
            return forward(*args, **keywords)
        num_tokens = input_ids.shape[1]
        if num_tokens > most:
            log.warning("a step of %d tokens is not prepared: max_num_tokens is %d",
                        num_tokens, most)  # fmt: skip
            return forward(*args, **keywords)
        if arguments["cache"] is not watched:
            watched = arguments["cache"]
            for name, tensor in tensors_by_path("cache", watched):
                prepared.watch(name, tensor)
        num_reqs = min(arguments["cu_seq_lens_q"].shape[0] - 1, prepared.config.max_num_reqs)
        decision = prepared.dispatch(Batch(num_tokens, min(num_reqs, num_tokens)))
        ids, positions = input_ids[0].long(), arguments["position_ids"][0].long()  # from int32
        hidden = prepared.run(decision, ids, positions, metadata=arguments)
        return StepOutput(last_hidden_state=hidden[None])

    return step


def _route_eager_calls(
    packed: PackedModel, model: Any, routed: Before, before: list[Before]
) -> None:
    """Where the packed model runs uncompiled, in a proof or instead of wrong code, its layers call
    the ops, as in the trace. All other calls of `model` have what is in `before` inside one."""

    def use(implementation: str, use_cache: bool) -> None:
        model.set_attn_implementation(implementation)
        packed.model.config.use_cache = use_cache

    def enter(*_: Any) -> None:
        before.append((model.config._attn_implementation, packed.model.config.use_cache))
        use(*routed)
        for mixer in packed.layers.values():
            mixer.install()

    def leave(*_: Any) -> None:
        use(*before.pop())
        if not before:
            run_own_forwards(packed.model)

    packed.register_forward_pre_hook(enter)
    packed.register_forward_hook(leave, always_call=True)


def _attend_with(module: Any, before: Sequence[Before]) -> Any:
    """The splitting op of one layer: the attention function that transformers has chosen."""
    functions = AttentionInterface()

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        rule: Rule,
        arguments: Mapping[str, Any],
    ) -> None:
        if not arguments:
            output.zero_()
            return
        rows = arguments["input_ids"].shape[1]
        real = output
        if rows < output.shape[0]:
            query, key, value, real = (x[:rows] for x in (query, key, value, output))
            output[rows:] = 0
        mask = arguments["attention_mask"]
        if isinstance(mask, Mapping):
            mask = mask[arguments["cache"].layer_to_allocator[module.layer_idx].layer_type]
        kept = {k: v for k, v in arguments.items() if k not in NOT_FOR_ATTENTION}
        query, key, value = (x.transpose(0, 1)[None] for x in (query, key, value))
        key, value = arguments["cache"].update(key, value, module.layer_idx, kwargs=kept)
        own = before[-1][0] if before else module.config._attn_implementation
        result, _ = functions[own](
            module,
            query,
            key,
            value,
            mask,
            dropout=0.0,
            scaling=rule.scale,
            sliding_window=rule.window or None,
            **kept,
        )
        real.copy_(result[0])

    return attend
