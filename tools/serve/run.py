"""The main job: start a model through the cache and serve a request trace with it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ... import (
    AttentionSupport,
    AuxiliaryTask,
    Config,
    Events,
    PreparedModel,
    RuntimeMode,
    prepare,
    switched_off,
)
from ...errors import InvalidSetting, TooLarge
from ..engine.attention import SPLITTING_OP
from ..engine.block_manager import BlockManager
from ..engine.decoder_config import DecoderConfig
from ..engine.engine import Clock, Engine
from ..engine.kv_cache import Defragmenter, LayerCache, allocate_layer_caches
from ..engine.metadata import MetadataBuffers
from ..engine.model import INPUTS, Decoder
from ..engine.sampler import Sampler, sampler_warmup
from ..engine.scheduler import Request, Scheduler
from ..report.sections import size
from .options import RunOptions
from .progress import counting, working
from .report import Report, build_report
from .verify import SAMPLE_EVERY, TOLERANCE, Verification, Verifier

Phases = list[tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Service:
    """A model that is ready, and the engine that serves with it."""

    prepared: PreparedModel
    model: Decoder
    layers: dict[str, LayerCache]
    buffers: MetadataBuffers
    engine: Engine
    verification: Verification


@contextmanager
def start_service(
    options: RunOptions,
    requests: Sequence[Request],
    phases: Phases,
    console: Console,
    events: Events | None = None,
) -> Iterator[Service]:
    """The model prepared and captured, and an engine that can serve `requests`; closed at the end.

    `phases` contains the startup times so far and is extended. Raises InvalidSetting for a device
    that is missing and for settings that the library rejects.
    """
    device = find_device(options.device)
    blocks = BlockManager(_num_blocks(options, requests), options.block_size)
    scheduler = Scheduler(
        blocks, max_num_tokens=options.max_num_tokens, max_num_reqs=options.max_num_reqs
    )
    for request in requests:
        scheduler.check(request)
    events = events or Events()
    with events.span("build model"), _phase(phases, "build model"), _allocation():
        model, layers, buffers = _build(options, requests, blocks, device)
    factory = partial(on_meta, options.model, options.dtype)
    with working(console, "preparing: from the cache, or tracing and compiling"):
        prepared = prepare(
            model,
            library_config(options),
            layers=layers,
            events=events,
            factory=factory if device.type != "cpu" else None,
        )
    try:
        engine, verification = _engine(options, prepared, model, layers, scheduler, buffers, device)
        caches = [part for cache in layers.values() for part in (cache.keys, cache.values)]
        prepared.ledger.own("KV cache", caches)
        with working(console, "warming up and capturing"):
            prepared.warm_up(buffers.padding, _warmup_tasks(prepared, model, engine))
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
    return build_report(
        options=options,
        prepared=service.prepared.report(),
        phases=phases,
        requests=requests,
        served=service.engine.served,
        verification=service.verification,
    )


def find_device(name: str) -> torch.device:
    """The device called `name`, if this machine has it."""
    reason = "the reference engine runs on cpu and cuda"
    if re.fullmatch(r"cpu|cuda(:\d+)?", name):
        try:
            device = torch.device(name)
            torch.empty(0, device=device)
            return device
        except (RuntimeError, AssertionError) as error:
            reason = _first_line(error)
    raise InvalidSetting(
        name="--device", value=name, reason=reason, expected="cpu, or cuda where torch finds a GPU"
    )


def library_config(options: RunOptions) -> Config:
    """The library's configuration for the reference decoder and its attention op."""
    left_to_the_library: dict[str, Any] = {
        "graph_mode": options.mode,
        "level": options.level,
        "capture_sizes": options.capture_sizes,
        "cache_dir": options.cache_dir,
        "dump_dir": options.dump_dir,
    }
    chosen = {name: value for name, value in left_to_the_library.items() if value is not None}
    config = Config(
        splitting_ops=(SPLITTING_OP,),
        inputs=INPUTS,
        max_num_tokens=options.max_num_tokens,
        max_num_reqs=options.max_num_reqs,
        strategy=options.strategy,
        compiler=options.backend,
        cache=options.cache,
        cold=options.cold,
        attention_support=AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE,
        **chosen,
    )
    return switched_off(config.changed(**dict(options.set)), options.off)


def build_model(options: RunOptions, device: torch.device) -> Decoder:
    """The reference decoder on `device`; raises TooLarge if it does not fit into memory."""
    require_memory(options.model.num_weights * torch.float32.itemsize)  # drawn on the host
    with _allocation():
        model = Decoder(options.model, seed=options.seed)
        return model.to(dtype=getattr(torch, options.dtype)).to(device)


def on_meta(config: DecoderConfig, dtype: str) -> Decoder:
    """The decoder without memory for its weights, which a child process compiles."""
    with torch.device("meta"):
        return Decoder(config, seed=0).to(getattr(torch, dtype))


def _build(
    options: RunOptions, requests: Sequence[Request], blocks: BlockManager, device: torch.device
) -> tuple[Decoder, dict[str, LayerCache], MetadataBuffers]:
    """The model with its KV cache, and the metadata's buffers: all that takes memory."""
    dtype = getattr(torch, options.dtype)
    model = build_model(options, device)
    if device.type == "cpu":
        slots = blocks.num_blocks * blocks.block_size
        row = options.model.kv_heads * options.model.head_dim * dtype.itemsize
        require_memory(2 * options.model.layers * slots * row)
    layers = allocate_layer_caches(
        model.layer_names,
        num_blocks=blocks.num_blocks,
        block_size=blocks.block_size,
        num_kv_heads=options.model.kv_heads,
        head_dim=options.model.head_dim,
        dtype=dtype,
        device=device,
    )
    buffers = MetadataBuffers(
        max_rows=options.max_num_tokens,
        max_blocks=_blocks_of_longest(options, requests),
        device=device,
    )
    return model, layers, buffers


def _warmup_tasks(prepared: PreparedModel, model: Decoder, engine: Engine) -> list[AuxiliaryTask]:
    """Warm-up tasks outside of the model: sampling for decode sizes, and moving blocks."""
    plan = prepared.dispatcher.plan
    sizes = [
        entry.descriptor.num_tokens for entry in plan.entries if entry.mode == RuntimeMode.FULL
    ]
    hidden = model.norm.weight[None]
    sampling = sampler_warmup(engine.sampler, model.logits, sizes, hidden)
    return [sampling, engine.defragmenter.warmup()]


def _engine(
    options: RunOptions,
    prepared: PreparedModel,
    model: Decoder,
    layers: dict[str, LayerCache],
    scheduler: Scheduler,
    buffers: MetadataBuffers,
    device: torch.device,
) -> tuple[Engine, Verification]:
    """The engine, running its steps through a verifier unless verification is off."""
    clock = Clock()
    verifier = Verifier(
        prepared,
        model,
        layers,
        clock=clock,
        tolerance=TOLERANCE[getattr(torch, options.dtype)],
        every=1 if options.verify == "all" else SAMPLE_EVERY,
    )
    run = prepared.run if options.verify == "none" else verifier.run
    engine = Engine(
        prepared,
        model.logits,
        scheduler,
        buffers,
        clock=clock,
        device=device,
        run=run,
        sampler=Sampler(seed=options.seed, device=device),
        defragmenter=Defragmenter(scheduler.blocks, layers),
    )
    return engine, verifier.result


def _blocks_of_longest(options: RunOptions, requests: Sequence[Request]) -> int:
    longest = max(request.num_tokens_at_end for request in requests)
    return -(-longest // options.block_size)


def _num_blocks(options: RunOptions, requests: Sequence[Request]) -> int:
    """The requested number, or enough for all requests at full length, and the dump block."""
    enough = options.max_num_reqs * _blocks_of_longest(options, requests)
    return 1 + (options.kv_blocks or enough)


@contextmanager
def _allocation() -> Iterator[None]:
    """Turn what numpy and torch raise for a size they cannot allocate into TooLarge."""
    try:
        yield
    except (MemoryError, RuntimeError, ValueError) as error:
        raise TooLarge(reason=_first_line(error)) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


@contextmanager
def _phase(phases: Phases, name: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    phases.append((name, time.perf_counter() - began))


MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def require_memory(num_bytes: int) -> None:
    """Raise TooLarge if the host cannot give so many bytes."""
    available = available_bytes()
    if num_bytes > available:
        needed = f"about {size(num_bytes)} are needed, {size(available)} are available"
        raise TooLarge(reason=needed)


def available_bytes() -> int:
    """Free memory of the machine, or of the control group of this process if that is less."""
    return min([_of_machine(), *_of_group()])


def _of_machine() -> int:
    """Memory available without swapping according to the kernel; all memory on other systems."""
    if MEMINFO.exists():
        for line in MEMINFO.read_text().splitlines():
            name, _, amount = line.partition(":")
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _of_group() -> Iterator[int]:
    """Limit less use of a container's control group, if it has a limit (version 2, then 1)."""
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield int((CGROUP / limit).read_text()) - int((CGROUP / used).read_text())
        except (OSError, ValueError):
            continue
