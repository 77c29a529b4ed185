"""The main job: start a model through the cache and serve a request trace with it."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ... import (
    AttentionSupport,
    AuxiliaryTask,
    Config,
    Events,
    GraphMode,
    PreparedModel,
    Ranks,
    RuntimeMode,
    Shadow,
    cache_root,
    prepare,
    switched_off,
)
from ...cache.names import entry_names
from ...dispatch import (
    Bucket,
    BucketLimits,
    BucketStrategy,
    BucketTable,
    Phase,
    filter_buckets,
    plan_buckets,
    read_buckets,
    setting_for,
)
from ...errors import InvalidSetting
from ..engine import lora
from ..engine.attention import SPLITTING_OP
from ..engine.block_manager import BlockManager
from ..engine.buckets import BucketEngine, Buckets, BucketScheduler
from ..engine.defragmenter import Defragmenter
from ..engine.drafts import Drafter
from ..engine.engine import ReferenceEngine
from ..engine.kv_cache import LayerCache, allocate_layer_caches
from ..engine.metadata import Buffers, MetadataBuffers, recorded
from ..engine.model import INPUTS, Decoder
from ..engine.overlap import OverlappingEngine
from ..engine.scheduler import Request, Scheduler, StepSchedule
from ..engine.serving_log import Clock
from ..sizes.suggested import suggested_sizes
from ..start_lines import Interrupted
from .host_memory import allocating, require_memory
from .options import RunOptions
from .progress import counting, starting
from .ranks import rank_facts
from .report import Report, build_report
from .verify import SAMPLE_EVERY, VerificationResult, Verifier

SAMPLED_REQUESTS = 4
"""Requests that are compared with the model's own `generate`, unless all are."""

Phases = list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Service:
    """A model that is ready, and the engine that serves with it."""

    prepared: PreparedModel
    model: Any
    layers: Mapping[str, LayerCache]
    buffers: Buffers
    engine: ReferenceEngine
    verification: VerificationResult


@contextmanager
def _saying_what_is_kept(config: Config) -> Iterator[None]:
    """An interrupt says what the cache keeps of the start."""
    root = cache_root(config)
    before = _stored_pieces(root)
    try:
        yield
    except Interrupted as interrupted:
        pieces = len(_stored_pieces(root) - before)
        interrupted.kept = f": compiled pieces that the cache keeps for the next start: {pieces}"
        raise


def _stored_pieces(root: Path | None) -> set[str]:
    with suppress(OSError):  # one that cannot be used is the library's to report
        names = entry_names(root) if root is not None else ()
        return {name for name in names if "/artifact/" in name}
    return set()


@contextmanager
def start_service(
    options: RunOptions,
    requests: Sequence[Request],
    phases: Phases,
    console: Console,
    events: Events | None = None,
    ranks: Ranks | None = None,
) -> Iterator[Service]:
    """The model prepared and captured, and an engine that can serve `requests`; closed at the end.

    `phases` contains the startup times so far and is extended. `ranks` serve in step with each
    other. Raises InvalidSetting for a device that is missing and for settings that the library
    rejects.
    """
    device = find_device(options.device)
    if options.triton:
        require_kernels(device)
    blocks = BlockManager(_num_blocks(options, requests), options.block_size)
    scheduler = (BucketScheduler if options.buckets else Scheduler)(
        blocks,
        max_num_tokens=options.max_num_tokens,
        max_num_reqs=options.max_num_reqs,
        drafter=Drafter(draft_schedule(options)) if options.speculate else None,
    )
    for request in requests:
        scheduler.check(request)
    events = events or Events()
    with events.span("build model") as building, allocating():
        model, layers, buffers = _build(options, requests, blocks, device)
    phases.append((building.name, building.seconds))
    config = library_config(options, model)
    config = config.changed(shadow=config.shadow or Shadow())
    if isinstance(buffers, Buckets):
        config = config.changed(
            sizes={"buckets": buffers.table.buckets, "bucket_limits": buffers.limits},
            graph_mode=GraphMode.FULL,
            attention={"support": AttentionSupport.ALWAYS},
        )
    with _saying_what_is_kept(config), starting(console, events):
        prepared = prepare(model, config, layers=layers, events=events, ranks=ranks)
    try:
        engine, verification = _engine(options, prepared, model, layers, scheduler, buffers)
        engine.ranks = ranks
        prepared.parts.proof.prove_with(recorded, buffers.refill)
        caches = [part for cache in layers.values() for part in (cache.keys, cache.values)]
        prepared.parts.strategies.ledger.own("KV cache", caches)
        for name, cache in layers.items():
            prepared.watch(f"keys of {name}", cache.keys)
            prepared.watch(f"values of {name}", cache.values)
        for name, tensor in buffers.tensors.items():
            prepared.watch(name, tensor)
        with starting(console, events) as show:
            show("warming up and capturing")
            tasks = _warmup_tasks(engine, model)
            prepared.warm_up(buffers.padding, tasks, skip=options.skip_warmup or ())
            prepared.seal()
        yield Service(prepared, model, layers, buffers, engine, verification)
    finally:
        prepared.close()


def serve(service: Service, requests: Sequence[Request], console: Console) -> None:
    """Serve `requests` to their end."""
    with counting(console, "serving requests", len(requests)) as advance:
        for completed in service.engine.serve(requests):
            advance(len(completed))


def service_report(
    service: Service, options: RunOptions, requests: Sequence[Request], phases: Phases
) -> Report:
    """The report of what was served."""
    drafter, speculation = service.engine.scheduler.drafter, None
    ranks = service.engine.ranks
    prepared = service.prepared
    if drafter is not None:
        saved = None
        # else the steps depend on the time that each takes, or on the requests of other ranks
        if options.time_scale == 0 and ranks is None:
            without = steps_without_drafts(options, requests)
            saved = without - len(service.engine.log.steps)
        speculation = {
            "proposed": drafter.proposed,
            "accepted": drafter.accepted,
            "steps_saved": saved,
        }
    generated = None
    if options.hf is not None and options.verify != "none":
        from .hugging_face import compare_with_generate

        some = [request for request in requests if request.sampling.temperature == 0]
        some = some if options.verify == "all" else some[:SAMPLED_REQUESTS]
        model = own_model(options, find_device(options.device))
        generated = compare_with_generate(model, some)
    defragmenter = service.engine.defragmenter
    report = build_report(
        generated=generated,
        speculation=speculation,
        swaps=None if defragmenter is None else defragmenter.swaps,
        options=options,
        prepared={**prepared.report(), "sizes": suggested_sizes(prepared)},
        phases=phases,
        requests=requests,
        log=service.engine.log,
        verification=service.verification,
    )
    if isinstance(service.buffers, Buckets):
        table = service.buffers.table
        report["buckets"]["fallbacks"] = [
            {"shape": shape, "steps": steps, "missing": service.buffers.missing(shape)}
            for shape, steps in table.fallbacks.items()
        ]
    report["ranks"] = ranks and ranks.exchange("report", rank_facts(report))
    return report


def steps_without_drafts(options: RunOptions, requests: Sequence[Request]) -> int:
    """Steps that serve `requests`, which all arrive at once, without speculative decoding."""
    return sum(1 for _ in scheduled_steps(Scheduler, options, requests))


def scheduled_steps(
    kind: type[Scheduler], options: RunOptions, requests: Sequence[Request]
) -> Iterator[StepSchedule]:
    """The steps that serve `requests`, which all arrive at once, without a model or drafts."""
    scheduler = kind(
        BlockManager(_num_blocks(options, requests), options.block_size),
        max_num_tokens=options.max_num_tokens,
        max_num_reqs=options.max_num_reqs,
    )
    for request in requests:
        prompt = request.tokens[: request.num_prompt]
        scheduler.add(Request(request.id, prompt, request.num_generate))
    while not scheduler.idle:
        schedule = scheduler.schedule()
        yield schedule
        scheduler.finish(schedule, [0] * len(schedule.shares))


def find_device(name: str) -> torch.device:
    """The device called `name`, if this machine has it."""
    reason = "the reference engine runs on cpu and cuda"
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
            return device
        except (RuntimeError, AssertionError) as error:
            reason = str(error).partition("\n")[0].rstrip(".")
    raise InvalidSetting(
        name="--device", value=name, reason=reason, expected="cpu, or cuda where torch finds a GPU"
    )


def require_kernels(device: torch.device) -> None:
    """Raise InvalidSetting where Triton's kernels cannot run: on a CPU they are interpreted."""
    from triton import knobs

    if device.type == "cpu" and not knobs.runtime.interpret:
        reason = "on a CPU Triton's kernels run in its interpreter, which is off"
        expected = "plain, or TRITON_INTERPRET=1 in the environment"
        raise InvalidSetting(name="--attention", value="triton", reason=reason, expected=expected)


def library_config(options: RunOptions, model: Any = None) -> Config:
    """The library's configuration for the reference decoder and its attention op, or for a model of
    transformers, which has its own ops and inputs."""
    inputs, support = INPUTS, AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE
    variants: dict[str, Any] = {}
    chosen = options.settings
    if options.speculate:
        support = AttentionSupport.UNIFORM_BATCH
        variants |= {"query_lens": 1, "speculation_schedule": draft_schedule(options)}
    if options.triton:
        support = AttentionSupport.ALWAYS
    if options.lora:
        inputs = {**INPUTS, **lora.INPUTS}
        variants |= {"max_loras": options.lora, "lora_graphs": "by_count"}
        chosen["tracing"] = {"symbol_limits": {"num_loras": (0, options.lora + 1)}}
        chosen["steps"] = {"padding": {"lora_rows": -1}}
    own: dict[str, Any] = {"splitting_ops": (SPLITTING_OP,), "inputs": inputs}
    if options.hf is not None:
        own = model.settings
        support = support if model.decodes_in_graphs else AttentionSupport.NEVER
    own = {**own, "attention": {"support": support}}
    config = Config(**own, variants=variants, **chosen)
    return switched_off(config.changed(**dict(options.set)), options.off)


def plan_of(
    options: RunOptions, requests: Sequence[Request]
) -> tuple[BucketTable, Callable[[Bucket], str]]:
    """The buckets of `--buckets`, of a strategy, or those of a file that the limits keep; and what
    says what a shape without one would need."""
    assert options.buckets is not None
    size = options.block_size
    longest = max(request.num_tokens_at_end for request in requests)
    limits = BucketLimits(
        block_size=size,
        max_num_tokens=options.max_num_tokens,
        max_model_len=-(-longest // size) * size,
        max_num_reqs=options.max_num_reqs,
        max_prefill_reqs=min(BucketScheduler.max_prefill_reqs, options.max_num_reqs),
    )
    chosen, parameters = options.buckets, dict(options.bucket)
    if isinstance(chosen, BucketStrategy):
        plans = [plan_buckets(phase, limits, chosen, parameters) for phase in Phase]
        table = BucketTable(itertools.chain(*plans), limits)
        return table, lambda shape: f"a larger {setting_for(shape, limits, chosen, parameters)}"
    stated = read_buckets(chosen.read_text(), source=str(chosen))
    kept = filter_buckets(stated, limits)
    if rejected := [tuple(bucket) for bucket in stated if not limits.keeps(bucket)]:
        warning = f"{len(rejected)} buckets of {chosen} fit no step and are left out: {rejected}"
        print(f"warning: {warning}", file=sys.stderr)
    return BucketTable(kept, limits), lambda shape: f"a line {tuple(shape)} of {chosen}"


def draft_schedule(options: RunOptions) -> tuple[int, ...]:
    """Drafts of a request by number of requests: all of them up to half the requests, then half."""
    rest = options.max_num_reqs // 2
    few, many = options.speculate, (options.speculate + 1) // 2
    return (few,) * (options.max_num_reqs - rest) + (many,) * rest


def build_model(options: RunOptions, device: torch.device) -> Any:
    """The decoder on `device`; raises TooLarge if it does not fit into memory."""
    weights = options.served_model.num_weights * torch.float32.itemsize  # drawn on the host
    require_memory(weights)
    with allocating():
        if options.hf is not None:
            from .hugging_face import HfDecoder

            return HfDecoder(own_model(options, device))
        model = Decoder(options.model, seed=options.seed, max_loras=options.lora)
        return model.to(dtype=getattr(torch, options.dtype)).to(device)


def own_model(options: RunOptions, device: torch.device) -> Any:
    """The model of transformers that `--hf` describes, as it is."""
    return options.hf.causal_model(options.seed, getattr(torch, options.dtype), device)


def _build(
    options: RunOptions, requests: Sequence[Request], blocks: BlockManager, device: torch.device
) -> tuple[Any, Mapping[str, LayerCache], Buffers]:
    """The model with its KV cache, and the metadata's buffers: all that takes memory."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options, device)
    size_of = {"num_blocks": blocks.num_blocks, "block_size": blocks.block_size}
    layers: Mapping[str, LayerCache]
    if options.hf is not None:
        from ..integrations.transformers.paged import paged_layers

        layers = paged_layers(model, **size_of, dtype=dtype)
    else:
        if device.type == "cpu":
            slots = blocks.num_blocks * blocks.block_size
            row = options.model.kv_heads * options.model.head_dim * dtype.itemsize
            require_memory(2 * options.model.layers * slots * row)
        layers = allocate_layer_caches(
            model.layer_names,
            **size_of,
            num_kv_heads=options.model.kv_heads,
            head_dim=options.model.head_dim,
            dtype=dtype,
            device=device,
            window=options.model.window,
        )
    if options.buckets:
        return model, layers, Buckets(*plan_of(options, requests), device)
    longest = _blocks_of_longest(options, requests)
    buffers = MetadataBuffers(
        max_rows=options.max_num_tokens, max_blocks=longest, device=device, triton=options.triton
    )
    return model, layers, buffers


def _warmup_tasks(engine: ReferenceEngine, model: Any) -> list[AuxiliaryTask]:
    """Warm-up outside of the model: sampling for decode sizes, and swaps of blocks."""
    scheduler, entries = engine.scheduler, engine.prepared.dispatcher.plan.entries
    most = scheduler.max_num_reqs * (1 + (scheduler.drafter.longest if scheduler.drafter else 0))
    full = [entry.descriptor.num_tokens for entry in entries if entry.mode == RuntimeMode.FULL]
    hidden = model.head.weight.new_zeros(1, model.head.weight.shape[1])
    sampling = engine.sampler.warmup(
        lambda rows: model.logits(hidden.expand(rows, -1)), [min(size, most) for size in full]
    )
    return [sampling, *([engine.defragmenter.warmup()] if engine.defragmenter else [])]


def _engine(
    options: RunOptions,
    prepared: PreparedModel,
    model: Any,
    layers: Mapping[str, LayerCache],
    scheduler: Scheduler,
    buffers: Buffers,
) -> tuple[ReferenceEngine, VerificationResult]:
    """The engine, running its steps through a verifier unless verification is off."""
    clock = Clock()
    every = 1 if options.verify == "all" else SAMPLE_EVERY
    verifier = Verifier(prepared, model, layers, clock=clock, every=every)
    defragmenter = None
    if options.defragment is not None:
        defragmenter = Defragmenter(scheduler.blocks, layers, options.defragment)
    kind = OverlappingEngine if options.overlap else ReferenceEngine
    kind = BucketEngine if options.buckets else kind
    engine = kind(prepared, model.logits, scheduler, buffers, clock, defragmenter)
    if options.verify != "none":
        engine.run = verifier.run
    return engine, verifier.result


def _blocks_of_longest(options: RunOptions, requests: Sequence[Request]) -> int:
    longest = max(request.num_tokens_at_end for request in requests) + options.speculate
    return -(-longest // options.block_size)


def _num_blocks(options: RunOptions, requests: Sequence[Request]) -> int:
    """The requested number, or enough for all requests at full length, and the dump block."""
    enough = options.max_num_reqs * _blocks_of_longest(options, requests)
    return 1 + (options.kv_blocks or enough)
